// For readers by keyboard and screen reader, what the theme leaves out: wide tables can be scrolled by keys, and the
// buttons beside each block of code, landmarks here, have a name of their own.
let blocks = 0;
const complete = () => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([aria-label])")) nav.ariaLabel = `Code ${++blocks}`;
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) table.tabIndex = 0;
};
new MutationObserver(complete).observe(document.documentElement, { childList: true, subtree: true });
complete();
