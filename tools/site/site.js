// The theme makes most of these after a page has loaded. A button to copy code is no landmark, and neither is a part of the
// navigation. A frame with a wide table scrolls with the keys, too. An empty cell heads no column.
new MutationObserver(() => {
  const parts = ".md-code__nav:not([role]), .md-nav .md-nav:not([role])";
  for (const nav of document.querySelectorAll(parts)) nav.setAttribute("role", "presentation");
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) frame.tabIndex = 0;
  for (const cell of document.querySelectorAll("th:empty")) cell.replaceWith(document.createElement("td"));
}).observe(document.documentElement, { childList: true, subtree: true });
