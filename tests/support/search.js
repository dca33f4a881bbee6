// Print the pages that the search of the built documentation finds, best first, as JSON.
// Its arguments are the folder of the pages, and the words.
const fs = require("fs");
const vm = require("vm");

const [folder, words] = process.argv.slice(2);
const document = {
  addEventListener() {},
  getElementById: () => null,
  readyState: "loading",
};
const browser = vm.createContext({ document, SPHINX_HIGHLIGHT_ENABLED: false });
browser.window = browser;
const run = (source) => vm.runInContext(source, browser);
for (const name of ["documentation_options", "doctools", "searchtools", "language_data"])
  run(fs.readFileSync(`${folder}/_static/${name}.js`, "utf8"));
run(fs.readFileSync(`${folder}/searchindex.js`, "utf8"));
const found = run(`Search._performSearch(...Search._parseQuery(${JSON.stringify(words)}))`);
// Each result begins with its page; the last one is the best.
console.log(JSON.stringify(found.reverse().map((result) => result[0])));
