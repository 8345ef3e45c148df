// The state of the view is the address' fragment: a link shows the same to others.

export const AXES = [
  ["step", "Step"],
  ["relative", "Elapsed"],
  ["time", "Time"],
  ["tokens", "Tokens"],
];
const DEFAULTS = { x: "step", from: "", to: "", smooth: "0", log: "0" };
const REPEATED = new Set(["run", "wide", "open"]);
const TABS = ["overview", "consensus", "experts", "samples", "checkpoints", "lineage", "plan", "events", "config"];

/**
 * @param {string} hash such as "#/run/ID/samples?x=time&smooth=0.6"
 * @returns {{page: string, id: string, tab: string, params: URLSearchParams}} an unknown page is "missing"
 */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#/, "").split("?", 2);
  const [page = "", id = "", tab = ""] = path.split("/").filter(Boolean);
  const params = new URLSearchParams(query);
  if (page === "" || page === "runs") return { page: "runs", id: "", tab: "", params };
  if (page === "compare" || page === "alerts") return { page, id: "", tab: "", params };
  if (page === "run" && /^[0-9a-f]{16}$/.test(id))
    return { page, id, tab: TABS.includes(tab) ? tab : "overview", params };
  return { page: "missing", id: "", tab: "", params };
}

/** The fragment of a view; what is as usual is not in it. */
export function format({ page, id, tab, params }) {
  const kept = new URLSearchParams();
  for (const [name, value] of params) if (value !== "" && value !== DEFAULTS[name]) kept.append(name, value);
  const path = page === "run" ? `#/run/${id}${tab && tab !== "overview" ? `/${tab}` : ""}` : `#/${page}`;
  const query = kept.toString();
  return query ? `${path}?${query}` : path;
}

export function current() {
  return parse(location.hash);
}

/** How charts are drawn, of checked parameters. */
export function chartOptions(params) {
  const number = (name) => {
    const text = params.get(name);
    const value = Number(text);
    return text && Number.isFinite(value) ? value : null;
  };
  const x = params.get("x");
  return {
    x: AXES.some(([name]) => name === x) ? x : DEFAULTS.x,
    from: number("from"),
    to: number("to"),
    smooth: Math.min(0.999, Math.max(0, number("smooth") ?? 0)),
    log: params.get("log") === "1",
    filter: params.get("metric") ?? "",
    wide: params.getAll("wide"),
  };
}

/** Changes parameters in place: null removes one; a list repeats it. Says nothing to the page: the caller draws. */
export function change(changes) {
  const view = current();
  for (const [name, value] of Object.entries(changes)) {
    view.params.delete(name);
    if (value === null) continue;
    for (const one of REPEATED.has(name) ? [value].flat() : [value]) view.params.append(name, String(one));
  }
  history.replaceState(null, "", format(view));
  return view;
}

/** The address of another page that keeps how charts are drawn. */
export function to(page, { id = "", tab = "", params = {} } = {}) {
  const kept = new URLSearchParams();
  const now = current().params;
  for (const name of ["x", "smooth", "log", "theme"]) if (now.has(name)) kept.set(name, now.get(name));
  if (page === "run" && current().id === id)
    for (const name of ["from", "to"]) if (now.has(name)) kept.set(name, now.get(name));
  for (const [name, value] of Object.entries(params)) for (const one of [value].flat()) kept.append(name, String(one));
  return format({ page, id, tab, params: kept });
}

/** A regular expression of a search field; null: everything. Throws SyntaxError. */
export function expression(text) {
  return text ? new RegExp(text.slice(0, 200), "i") : null;
}
