// Looks at the dashboard in headless Chromium: screenshots, axe-core, a walk by Tab alone.
// dashboard_screens.py starts it:
// node dashboard_screens.mjs '{"address": ..., "out": ..., "modules": ..., "chromium": ..., "quick": false}'

import { join } from "node:path";
import { axeFindings, checkWidth, finish, launch, listen, report, settings } from "./looking.mjs";

const SIZES = {
  desktop: { width: 1280, height: 900 },
  phone: { width: 390, height: 844, isMobile: true, hasTouch: true, deviceScaleFactor: 2 },
};
const THEMES = ["light", "dark"];
const MOST_TABS = 400;
const DRAWN_MS = 20_000;

async function pages() {
  const { runs } = await (await fetch(`${settings.address}/api/runs?sort=name`)).json();
  const id = (part) => runs.find(({ name }) => name.includes(part))?.id;
  const several = ["baseline", "resumed", "four nodes", "experts"]
    .map(id)
    .filter(Boolean)
    .map((one) => `run=${one}`)
    .join("&");
  const all = {
    runs: "#/runs",
    run: `#/run/${id("live")}`,
    smooth: `#/run/${id("baseline")}?smooth=0.9&log=1&x=relative`,
    consensus: `#/run/${id("four nodes")}/consensus`,
    experts: `#/run/${id("experts")}/experts`,
    samples: `#/run/${id("baseline")}/samples`,
    checkpoints: `#/run/${id("whole") ?? id("live")}/checkpoints`,
    lineage: `#/run/${id("whole") ?? id("live")}/lineage`,
    plan: `#/run/${id("whole") ?? id("live")}/plan`,
    events: `#/run/${id("resumed")}/events`,
    config: `#/run/${id("baseline")}/config`,
    compare: `#/compare?${several}`,
    alerts: "#/alerts",
    none: "#/runs?search=no%20such%20run",
    missing: "#/run/0000000000000000",
  };
  const names = settings.only?.length ? settings.only : Object.keys(all);
  return Object.fromEntries(names.map((name) => [name, all[name]]));
}

async function settled(page) {
  const isSettled = () =>
    page.evaluate(() => {
      const seen = (element) => {
        const box = element.getBoundingClientRect();
        return box.top < innerHeight && box.bottom > 0;
      };
      const plots = [...document.querySelectorAll(".plot")].filter(seen);
      return (
        document.querySelector("h1, .state") !== null &&
        ![...document.querySelectorAll(".skeleton, [aria-busy]")].some(seen) &&
        plots.every((plot) => plot.dataset.drawn || plot.querySelector(".state, .unavailable"))
      );
    });
  const end = Date.now() + DRAWN_MS;
  while (!(await isSettled())) {
    if (Date.now() > end) return false;
    await new Promise((resolve) => setTimeout(resolve, 150));
  }
  await new Promise((resolve) => setTimeout(resolve, 350));
  return true;
}

/** Chromium draws only what is seen: scroll through, so that all charts of the page load. */
async function scrollThrough(page) {
  const steps = await page.evaluate(() => Math.ceil(document.documentElement.scrollHeight / innerHeight));
  for (let step = 0; step < Math.min(steps, 14); step += 1) {
    await page.evaluate((at) => scrollTo(0, at * innerHeight), step);
    await settled(page);
  }
  await page.evaluate(() => scrollTo(0, 0));
  await settled(page);
}

/** Tab from the top until it comes back: all that can have the focus gets it, and it shows. */
async function walk(page, where) {
  await page.evaluate(() => {
    document.activeElement?.blur();
    scrollTo(0, 0);
  });
  const wanted = await page.evaluate(() => {
    const all = [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")];
    const radios = new Set();
    const can = all.filter((one) => {
      if (one.disabled || one.closest("[hidden]") || one.checkVisibility?.({ visibilityProperty: true }) === false)
        return false;
      const closed = one.closest("details:not([open])");
      if (closed && !(one.tagName === "SUMMARY" && one.parentElement === closed)) return false;
      if (one.type !== "radio") return true;
      if (radios.has(one.name)) return false; // one of a group has the focus
      radios.add(one.name);
      return true;
    });
    can.forEach((one, at) => {
      one.dataset.walk = one.type === "radio" ? `radio ${one.name}` : String(at);
    });
    document.querySelectorAll("input[type=radio]").forEach((one) => {
      one.dataset.walk = `radio ${one.name}`;
    });
    return can.map((one) => [
      one.dataset.walk,
      `${one.tagName.toLowerCase()} ${one.getAttribute("aria-label") ?? one.textContent.slice(0, 40)}`,
    ]);
  });
  const reached = new Set();
  let still = 0;
  let last = null;
  for (let press = 0; press < MOST_TABS; press += 1) {
    await page.keyboard.press("Tab");
    const now = await page.evaluate(() => {
      const one = document.activeElement;
      if (!one || one === document.body) return null;
      const marked = one.matches(".segments input") ? one.nextElementSibling : one;
      const style = getComputedStyle(marked);
      const box = marked.getBoundingClientRect();
      const shows =
        (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1.5) || style.boxShadow !== "none";
      const seen = box.bottom > 0 && box.top < innerHeight && box.width > 0;
      return {
        key: one.dataset.walk ?? "new",
        name: `${one.tagName.toLowerCase()} ${one.getAttribute("aria-label") ?? one.textContent.slice(0, 40)}`,
        shows,
        seen,
      };
    });
    if (now === null) break;
    if (reached.has(now.key) && now.key === wanted[0]?.[0]) break;
    still = now.key === last ? still + 1 : 0;
    last = now.key;
    if (still > 3) {
      report("keyboard", where, `the focus stays on ${now.name}`);
      break;
    }
    if (!now.shows) report("keyboard", where, `no mark of the focus on ${now.name}`);
    if (!now.seen) report("keyboard", where, `the focus is out of sight on ${now.name}`);
    reached.add(now.key);
  }
  const missed = wanted.filter(([key]) => !reached.has(key));
  if (missed.length)
    report(
      "keyboard",
      where,
      `Tab does not reach ${missed.length} of ${wanted.length}: ${missed
        .slice(0, 6)
        .map(([, name]) => name)
        .join("; ")}`,
    );
  return { wanted: wanted.length, reached: reached.size };
}

/** What a viewer does on a run's page: each must show in the page and in its address. */
async function act(browser) {
  const context = await browser.createBrowserContext(); // of its own: the theme is stored
  const page = await context.newPage();
  listen(page, () => "acts");
  await page.setViewport(SIZES.desktop);
  const { runs } = await (await fetch(`${settings.address}/api/runs?search=^live$`)).json();
  await page.goto(`${settings.address}/#/run/${runs[0].id}`);
  await settled(page);
  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const query = () => page.evaluate(() => Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] ?? "")));
  const label = () => page.$eval(".plot", (plot) => plot.getAttribute("aria-label"));
  const expect = (isTrue, text) => isTrue || report("act", "run", text);

  const before = await label();
  await pause(3500);
  expect((await label()) !== before, "a live chart does not follow within 3.5 s");
  await page.focus(".plot");
  await page.keyboard.press("+");
  await pause(900);
  expect("from" in (await query()) && "to" in (await query()), "+ does not zoom");
  const box = await (await page.$(".plot")).boundingBox();
  await page.keyboard.press("0");
  await pause(900);
  expect(!("from" in (await query())), "0 does not show all");
  await page.mouse.move(box.x + 100, box.y + 90);
  await page.mouse.down();
  await page.mouse.move(box.x + 220, box.y + 95, { steps: 6 });
  await page.mouse.up();
  await pause(900);
  expect("from" in (await query()), "a drag does not zoom");
  await page.focus("input[type=range]");
  for (let press = 0; press < 8; press += 1) await page.keyboard.press("ArrowRight");
  await page.$eval(".switch input", (input) => input.click());
  await page.type(".controls input[type=search]", "mfu|^loss");
  await pause(1200);
  const kept = await query();
  expect(
    Number(kept.smooth) > 0.8 && kept.log === "1" && kept.metric === "mfu|^loss",
    `the address does not keep the view: ${JSON.stringify(kept)}`,
  );
  const titles = () => page.$$eval(".panel h3", (all) => all.map((one) => one.textContent).join(", "));
  const found = await titles();
  expect(/Loss/.test(found) && !/Learning/.test(found), `the search shows ${found}`);
  await page.reload();
  await settled(page);
  expect((await titles()) === found, "a link does not keep the search");
  expect(await page.$eval(".switch input", (input) => input.checked), "a link does not keep the log scale");
  const picture = await page.evaluate(async () =>
    (await import("/static/chart.js")).png(document.querySelector(".plot")),
  );
  expect(picture.startsWith("data:image/png") && picture.length > 5000, "no PNG is made");
  const csv = await page.evaluate(async () => (await fetch(document.querySelector("a[download]").href)).text());
  expect(csv.startsWith("run,metric,step,time,value") && csv.split("\n").length > 10, "no CSV is made");
  await page.$eval(".panel-tools button", (button) => button.click());
  expect((await page.$$(".panel tbody tr")).length > 5, "no table is shown");
  const theme = await page.$eval("html", (html) => html.dataset.theme);
  await page.click("#theme");
  await page.click("#theme");
  expect((await page.$eval("html", (html) => html.dataset.theme)) !== theme, "the theme does not change");
  await context.close();
}

async function look(browser, size, theme, places, looked) {
  const page = await browser.newPage();
  let name = "";
  const where = () => `${name} ${size} ${theme}`;
  const waiting = new Set();
  page.on("request", (request) => waiting.add(request.url()));
  for (const end of ["requestfinished", "requestfailed"]) page.on(end, (request) => waiting.delete(request.url()));
  listen(page, where);
  await page.setViewport(SIZES[size]);
  await page.emulateMediaFeatures([
    { name: "prefers-color-scheme", value: theme },
    { name: "prefers-reduced-motion", value: "reduce" },
  ]);
  for (const [one, fragment] of Object.entries(places)) {
    name = one;
    const began = Date.now();
    await page.goto("about:blank");
    await page.goto(`${settings.address}/${fragment}`, { waitUntil: "domcontentloaded" });
    if (!(await settled(page)))
      report(
        "slow",
        where(),
        `not drawn after ${DRAWN_MS / 1000} s; waits for ` +
          ([...waiting].filter((one) => !one.endsWith("/events")).join(" ") || "nothing"),
      );
    const opened_ms = Date.now() - began;
    const file = join(settings.out, `${one}-${size}-${theme}`);
    await page.screenshot({ path: `${file}.png` });
    await scrollThrough(page);
    await checkWidth(page, where());
    const cut = await page.evaluate(() => {
      const box = document.querySelector("table.runs")?.closest(".table-box");
      return box ? box.scrollWidth - box.clientWidth : 0;
    });
    if (cut > 0) report("layout", where(), `the list of runs is ${cut} pixels wider than its card`);
    const violations = await axeFindings(page, where());
    const tabs = theme === "light" ? await walk(page, where()) : null;
    await page.evaluate(() => {
      document.activeElement?.blur();
      scrollTo(0, 0);
    });
    await page.screenshot({ path: `${file}-full.png`, fullPage: true, captureBeyondViewport: true });
    looked.push({ page: one, size, theme, opened_ms, violations, tabs });
  }
  await page.close();
}

const browser = await launch();
const looked = [];
try {
  const places = await pages();
  if (!settings.only?.length || settings.only.includes("acts")) await act(browser);
  delete places.acts;
  for (const size of settings.sizes ?? Object.keys(SIZES))
    for (const theme of settings.themes ?? THEMES) await look(browser, size, theme, places, looked);
} finally {
  await browser.close();
}
finish(looked);
