// Prints, as JSON, the page that the built documentation's search shows first for each query.
// node search.js FOLDER QUERY...
const { readFileSync } = require("fs");
const vm = require("vm");

const [folder, ...queries] = process.argv.slice(2);
const element = { addEventListener() {}, dataset: { content_root: "" } };
const context = vm.createContext({
  document: { documentElement: element, getElementById: () => ({ children: [] }) },
  addEventListener() {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
  _ready() {},
  DOCUMENTATION_OPTIONS: { FILE_SUFFIX: ".html", LINK_SUFFIX: ".html" },
});
context.window = context;
for (const file of ["_static/searchtools.js", "_static/language_data.js", "searchindex.js"]) {
  vm.runInContext(readFileSync(`${folder}/${file}`, "utf8"), context);
}
const first = (query) => {
  context.query = query;
  const [result] = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", context).slice(-1);
  return result ? result[0] : null;
};
console.log(JSON.stringify(Object.fromEntries(queries.map((query) => [query, first(query)]))));
