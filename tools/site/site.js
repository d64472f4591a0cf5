// The theme makes these after a page has loaded. A button to copy code is no landmark, a frame with a wide table scrolls with
// the keys, too, and an empty cell heads no column.
new MutationObserver(() => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([role])")) nav.setAttribute("role", "presentation");
  for (const frame of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) frame.tabIndex = 0;
  for (const cell of document.querySelectorAll("th:empty")) cell.replaceWith(document.createElement("td"));
}).observe(document.documentElement, { childList: true, subtree: true });
