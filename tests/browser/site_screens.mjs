// Looks at the site in headless Chromium: screenshots, axe-core, what is cut, and the search. site_screens.py starts it:
// node site_screens.mjs '{"address": ..., "out": ..., "modules": ..., "chromium": ..., "pages": [...]}'

import { join } from "node:path";
import { axeFindings, checkWidth, finish, launch, listen, report, settings } from "./looking.mjs";

const SIZES = {
  1280: { width: 1280, height: 800 },
  390: { width: 390, height: 844, isMobile: true, hasTouch: true, deviceScaleFactor: 2 },
};
const SCHEMES = { light: "default", dark: "slate" };

/** Words and pictures of the page that no scrolling shows. */
async function checkCut(page, where) {
  const cut = await page.evaluate(() => {
    const hides = (element) => ["hidden", "clip"].includes(getComputedStyle(element).overflowX);
    const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
    return [...document.querySelectorAll("article :is(table, pre, code, img, svg, p, li, h1, h2, h3)")]
      .filter((element) => {
        const right = element.getBoundingClientRect().right;
        for (let box = element.parentElement; box && box.tagName !== "BODY"; box = box.parentElement) {
          if (scrolls(box)) return false;
          if (hides(box) && right > box.getBoundingClientRect().right + 1) return true;
        }
        return right > innerWidth + 1;
      })
      .slice(0, 4)
      .map((element) => `${element.tagName.toLowerCase()} ${element.textContent.trim().slice(0, 60)}`);
  });
  for (const text of cut) report("layout", where, `cut: ${text}`);
}

async function checkSearch(page, where) {
  await page.keyboard.press("/");
  await new Promise((resolve) => setTimeout(resolve, 500));
  await page.keyboard.type("finetune", { delay: 30 });
  const isFound = () =>
    [...document.querySelectorAll("*")].some((host) => /capibara finetune/.test(host.shadowRoot?.textContent ?? ""));
  await page.waitForFunction(isFound, { timeout: 10_000 }).catch(() => report("search", `search ${where}`, "nothing for finetune"));
  await new Promise((resolve) => setTimeout(resolve, 1000));
  await page.screenshot({ path: join(settings.out, `search-${where.replaceAll(" ", "-")}.png`) });
  await axeFindings(page, `search ${where}`);
}

async function look(browser, size, theme, looked) {
  const context = await browser.createBrowserContext(); // of its own: the theme is stored
  const page = await context.newPage();
  let name = "";
  listen(page, () => `${name} ${size} ${theme}`);
  await page.setViewport(SIZES[size]);
  await page.emulateMediaFeatures([
    { name: "prefers-color-scheme", value: theme },
    { name: "prefers-reduced-motion", value: "reduce" },
  ]);
  for (name of settings.pages) {
    const where = `${name} ${size} ${theme}`;
    await page.goto(`${settings.address}/${name}.html`, { waitUntil: "networkidle0" });
    const scheme = await page.$eval("body", (body) => body.dataset.mdColorScheme);
    if (scheme !== SCHEMES[theme]) report("theme", where, `the page is in ${scheme}`);
    const file = join(settings.out, `${name.replaceAll("/", "-")}-${size}-${theme}`);
    await page.screenshot({ path: `${file}.png` });
    await page.screenshot({ path: `${file}-full.png`, fullPage: true });
    await checkWidth(page, where);
    await checkCut(page, where);
    looked.push({ page: name, size, theme, violations: await axeFindings(page, where) });
  }
  await checkSearch(page, `${size} ${theme}`);
  await context.close();
}

const browser = await launch();
const looked = [];
try {
  for (const size of Object.keys(SIZES)) for (const theme of Object.keys(SCHEMES)) await look(browser, size, theme, looked);
} finally {
  await browser.close();
}
finish(looked);
