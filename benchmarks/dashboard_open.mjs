// Opens pages of the dashboard in headless Chromium; benchmarks/dashboard.py starts it:
// node dashboard_open.mjs '{"modules": FOLDER, "chromium": PATH}'
// For each address on standard input it prints the seconds until the charts that are seen are drawn; -1: they are not, in a minute.

import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const settings = JSON.parse(process.argv[2]);
const puppeteer = createRequire(join(settings.modules, "package.json"))("puppeteer-core");
const DRAWN_MS = 60_000;

function isDrawn() {
  const plots = [...document.querySelectorAll(".plot")].filter((plot) => {
    const box = plot.getBoundingClientRect();
    return box.top < innerHeight && box.bottom > 0;
  });
  const drawn = plots.filter((plot) => plot.dataset.drawn && plot.querySelector(".scatterlayer .trace"));
  const empty = plots.filter((plot) => plot.querySelector(".state, .unavailable"));
  return drawn.length > 0 && drawn.length + empty.length === plots.length;
}

const browser = await puppeteer.launch({ executablePath: settings.chromium, args: ["--no-sandbox"] });
console.log("ready");
for await (const address of createInterface({ input: process.stdin })) {
  const page = await browser.newPage();
  await page.setViewport({ width: 1440, height: 900 });
  const begin = performance.now();
  try {
    await page.goto(address, { waitUntil: "domcontentloaded" });
    await page.waitForFunction(isDrawn, { timeout: DRAWN_MS, polling: 50 });
    console.log((performance.now() - begin) / 1000);
  } catch (error) {
    console.error(String(error));
    console.log(-1);
  }
  await page.close();
}
await browser.close();
