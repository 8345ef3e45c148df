// Begins to load plotly.js, which is large, beside the modules of a page with charts.

if (/^#\/(run|compare)\b/.test(location.hash)) {
  const link = document.createElement("link");
  Object.assign(link, { rel: "preload", as: "script", href: "/static/plotly.min.js" });
  document.head.append(link);
}
