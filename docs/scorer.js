// Search shows pages that say what to do before those that describe.
Scorer.score = ([page, , , , score]) =>
  score + (/^(install|quick-start|how-to|troubleshooting)/.test(page) ? 10 : 0);
