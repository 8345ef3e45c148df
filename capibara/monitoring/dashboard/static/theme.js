// Light, dark, or as the system says.

const KEY = "capibara-theme";
const CHOICES = ["system", "light", "dark"];
const DARK = matchMedia("(prefers-color-scheme: dark)");
let chosen = "system";

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be forbidden
  }
}

export function choice() {
  return chosen;
}

/** Takes the theme of the address, else the stored one, else the system's. */
export function begin(params) {
  const named = params.get("theme") ?? stored();
  chosen = CHOICES.includes(named) ? named : "system";
  DARK.addEventListener("change", apply);
  apply();
}

export function next() {
  chosen = CHOICES[(CHOICES.indexOf(chosen) + 1) % CHOICES.length];
  try {
    localStorage.setItem(KEY, chosen);
  } catch {
    // not kept, then
  }
  apply();
  return chosen;
}

function apply() {
  const dark = chosen === "dark" || (chosen === "system" && DARK.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.dispatchEvent(new CustomEvent("theme"));
}

/** The value of a colour of the style sheet. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
