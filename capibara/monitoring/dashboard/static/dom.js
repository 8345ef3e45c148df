// Elements without markup: every text becomes a text node, so nothing that a run wrote can be markup.

const LEAST_SPAN = 0.12;
const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  search: ["M7 12.500a5.500 5.500 0 1 0 0-11 5.500 5.500 0 0 0 0 11Z", "m11 11 3.500 3.500"],
  sun: [
    "M8 11a3 3 0 1 0 0-6 3 3 0 0 0 0 6Z",
    "M8 1v1.500M8 13.500V15M1 8h1.500M13.500 8H15",
    "M3 3l1.100 1.100M11.900 11.900 13 13M13 3l-1.100 1.100M4.100 11.900 3 13",
  ],
  moon: ["M13.500 9.800A6 6 0 0 1 6.200 2.500a6 6 0 1 0 7.300 7.300Z"],
  system: ["M2 3h12v8H2z", "M5.500 14h5M8 11v3"],
  wide: ["M9.500 2.500h4v4M6.500 13.500h-4v-4M13.500 2.500l-4.500 4.500M2.500 13.500 7 9"],
  table: ["M2.500 3h11v10h-11zM2.500 6.500h11M6.500 6.500V13"],
  save: ["M8 2v8M4.800 7 8 10.200 11.200 7M2.500 13.500h11"],
  image: ["M2.500 3h11v10h-11z", "m3 11.500 3.200-3.500 2.300 2.300 1.800-1.800 2.700 2.900", "M10.300 6.200h.01"],
  link: [
    "M6.500 9.500 9.500 6.500M7 4.500l1.300-1.300a3 3 0 0 1 4.300 4.300L11.300 8.800",
    "M9 11.500l-1.300 1.300a3 3 0 0 1-4.300-4.300L4.700 7.200",
  ],
  close: ["m4.500 4.500 7 7M11.500 4.500l-7 7"],
  tune: [
    "M2 5h7M13 5h1M2 11h1M7 11h7",
    "M11 6.800a1.800 1.800 0 1 0 0-3.600 1.800 1.800 0 0 0 0 3.600Z",
    "M5 12.800a1.800 1.800 0 1 0 0-3.600 1.800 1.800 0 0 0 0 3.600Z",
  ],
  folder: ["M1.500 4.500v8h13v-6.500H8L6.500 3.500h-5z"],
  warn: ["M8 2 1.500 13.500h13zM8 6.500v3M8 11.500h.01"],
  bell: ["M3.500 11.500c1-1 1-2 1-4a3.500 3.500 0 0 1 7 0c0 2 0 3 1 4zM6.800 13.500h2.400"],
  check: ["m3 8.500 3.500 3.500L13 5"],
  back: ["M9.500 3.500 5 8l4.500 4.500"],
};

/**
 * An element. Attributes `on*` are listeners, `vars` are CSS custom or plain properties; texts are never markup.
 * @param {string} tag
 * @param {Object<string, unknown>} attrs null and false omit an attribute
 * @param {...(Node|string|number|null|false|Array)} children
 */
export function h(tag, attrs = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs)) set(element, name, value);
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function set(element, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
  else if (name === "vars") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
  else element.setAttribute(name, value === true ? "" : String(value));
}

export function svg(tag, attrs = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attrs)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export function icon(name) {
  const paths = ICONS[name].map((d) => svg("path", { d }));
  return svg("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" }, ...paths);
}

/** A button with a picture alone; its name is for screen readers and a tooltip. */
export function iconButton(name, label, onclick, attrs = {}) {
  return h(
    "button",
    { type: "button", class: "icon-button bare", "aria-label": label, title: label, onclick, ...attrs },
    icon(name),
  );
}

/** What is shown where there is nothing, or nothing yet. */
export function state(name, title, text, ...more) {
  return h("div", { class: "state" }, icon(name), h("h2", {}, title), text && h("p", {}, text), ...more);
}

/** The same as all of a page: its title is the page's. */
export function pageState(name, title, text, ...more) {
  return h("div", { class: "state" }, icon(name), h("h1", {}, title), text && h("p", {}, text), ...more);
}

export function skeleton(height_px) {
  return h("div", { class: "skeleton", vars: { height: `${height_px}px` }, "aria-hidden": "true" });
}

export function fill(element, ...children) {
  element.replaceChildren(
    ...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false),
  );
}

let toastTimer = 0;
/** Says something short at the foot of the page, for screen readers as well. */
export function toast(text) {
  const box = document.getElementById("toast");
  box.textContent = text;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => {
    box.textContent = "";
  }, 3200);
}

/** A group of radio buttons that looks like one control. */
export function segments(name, label, choices, chosen, onchange) {
  const inputs = choices.map(([value, text]) =>
    h(
      "label",
      {},
      h("input", { type: "radio", name, value, checked: value === chosen, onchange: () => onchange(value) }),
      h("span", {}, text),
    ),
  );
  return h("div", { class: "segments", role: "radiogroup", "aria-label": label }, inputs);
}

export function searchBox(label, placeholder, value, oninput) {
  let timer = 0;
  const input = h("input", {
    type: "search",
    "aria-label": label,
    placeholder,
    value,
    autocomplete: "off",
    spellcheck: "false",
    maxlength: 200,
    oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(() => oninput(input.value, input), 250);
    },
  });
  return h("div", { class: "search" }, icon("search"), input);
}

/** Saves a blob or an address as a file. */
export function download(href, name) {
  const link = h("a", { href, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

/** A line of small figures as a picture; without figures, nothing. */
export function spark(values, label) {
  const found = (values ?? []).filter((value) => value !== null && Number.isFinite(value));
  if (found.length < 2) return h("div", { class: "spark", "aria-hidden": "true" });
  const [least, most] = [Math.min(...found), Math.max(...found)];
  const span = Math.max(most - least, LEAST_SPAN * Math.abs(most)) || 1; // noise alone must not fill the picture
  const low = (least + most - span) / 2;
  const points = found.map(
    (value, at) => `${((100 * at) / (found.length - 1)).toFixed(2)},${(27 - (23 * (value - low)) / span).toFixed(2)}`,
  );
  const named = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", ...named },
    svg("path", { class: "area", d: `M0,30L${points.join("L")}L100,30Z` }),
    svg("path", { d: `M${points.join("L")}` }),
  );
}
