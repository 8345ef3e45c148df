// What scrolls can be reached by the keyboard.
addEventListener("load", () => {
  for (const element of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) element.tabIndex = 0;
});

// The search of zensical 0.0.73 lies in a shadow root: its words get 4.5:1 against their ground (--search-mark is in site.css),
// and a result is named by all that it shows.
const readable = new CSSStyleSheet();
readable.replaceSync(`
  dialog[open] { --color-highlight: var(--search-mark); }
  dialog[open] :is(ol, menu, ul) :is(ol, menu, ul), dialog[open] div > div:not(:has(*)) { color: rgb(var(--color-foreground) / 0.75); }
`);
const rename = ({ shadowRoot }) =>
  shadowRoot.querySelectorAll("[role=option][aria-labelledby]").forEach((item) => item.removeAttribute("aria-labelledby"));
new MutationObserver(() => {
  for (const host of document.querySelectorAll("body > div")) {
    if (!host.shadowRoot || host.shadowRoot.adoptedStyleSheets.includes(readable)) continue;
    host.shadowRoot.adoptedStyleSheets.push(readable);
    new MutationObserver(() => rename(host)).observe(host.shadowRoot, { childList: true, subtree: true });
  }
}).observe(document.body, { childList: true });
