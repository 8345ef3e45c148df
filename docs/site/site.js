// What scrolls can be reached by the keyboard.
addEventListener("load", () => {
  for (const element of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) element.tabIndex = 0;
});
