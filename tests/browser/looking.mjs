// What the scripts that look at pages share: Chromium, what it finds, and the end.

import { createRequire } from "node:module";
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";

export const settings = JSON.parse(process.argv[2]);
const require = createRequire(join(settings.modules, "package.json"));
const puppeteer = require("puppeteer-core");
const axe = require("axe-core");

const SERIOUS = new Set(["serious", "critical"]);
const findings = [];

export const report = (kind, where, text, more = {}) => {
  findings.push({ kind, where, text, ...more });
  console.log(`${kind}: ${where}: ${text}`);
};

export async function launch() {
  mkdirSync(settings.out, { recursive: true });
  return puppeteer.launch({
    executablePath: settings.chromium,
    headless: true,
    args: ["--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb"],
  });
}

export async function axeFindings(page, where) {
  await page.evaluate(axe.source);
  const found = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  for (const one of found.violations) {
    const nodes = one.nodes.slice(0, 4).map((node) => `${node.html.slice(0, 160)} ${node.any[0]?.message ?? ""}`);
    report(SERIOUS.has(one.impact) ? "axe" : "axe minor", where, `${one.id}: ${one.help} (${one.nodes.length})`, {
      impact: one.impact,
      nodes,
    });
  }
  return found.violations.length;
}

export async function checkWidth(page, where) {
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (wide > 0) report("layout", where, `the page is ${wide} pixels wider than the window`);
}

export function listen(page, where) {
  page.on(
    "console",
    (message) =>
      ["error", "warn"].includes(message.type()) &&
      !/404/.test(message.text()) &&
      report("console", where(), message.text().slice(0, 300)),
  );
  page.on("pageerror", (error) => report("script", where(), String(error.stack ?? error).slice(0, 400)));
  page.on("dialog", async (dialog) => {
    report("injection", where(), dialog.message());
    await dialog.dismiss();
  });
}

/** Writes findings.json and ends the process: with 1 if anything serious was found. */
export function finish(looked) {
  const isSerious = ({ kind }) => kind !== "axe minor";
  const summary = {
    serious: findings.filter(isSerious).length,
    minor: findings.filter((one) => !isSerious(one)).length,
    looked: looked.length,
  };
  writeFileSync(join(settings.out, "findings.json"), `${JSON.stringify({ summary, findings, looked }, null, 1)}\n`);
  console.log(`${summary.looked} views, ${summary.serious} serious findings, ${summary.minor} minor`);
  process.exit(summary.serious ? 1 : 0);
}
