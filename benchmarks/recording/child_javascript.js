// Runs a session of JavaScript cells as the REPL does: one global scope, the value of a cell is displayed.
// Reads {"package", "name", "cells"} from standard input and writes [0, execution] lines. Cells have no process, no network and
// no module but the package; node's permission model refuses to write files, and to start processes and threads.
"use strict";
const util = require("util");
const vm = require("vm");
const fs = require("fs");

const MOST_MS = 2000, PENDING_MS = 300;
const given = JSON.parse(fs.readFileSync(0, "utf8"));
const output = fs.writeSync.bind(fs, 1);
const timeout = globalThis.setTimeout;
const exit = process.exit.bind(process);

const refused = {
  net: ["connect", "createConnection", "createServer", "Socket", "Server"],
  dgram: ["createSocket", "Socket"],
  dns: ["lookup", "resolve", "Resolver"],
  http: ["request", "get", "createServer", "Agent"],
  https: ["request", "get", "createServer", "Agent"],
};
const refuse = (name) => () => {
  throw new Error(`${name} is not allowed here`);
};
const network = Object.keys(refused).map((name) => [name, require(name)]); // all of them before the first one changes
network[0][1].Socket.prototype.connect = refuse("net.connect");
for (const [module, loaded] of network) {
  for (const name of refused[module]) {
    loaded[name] = refuse(`${module}.${name}`);
  }
}

let pieces = { stdout: [], stderr: [] };
const write = (stream) => (...values) => void pieces[stream].push(util.format(...values) + "\n");
globalThis.console = Object.freeze({
  log: write("stdout"), info: write("stdout"), debug: write("stdout"), dir: write("stdout"),
  error: write("stderr"), warn: write("stderr"), trace: write("stderr"),
});
const loaded = require(given.package);
globalThis.require = (name) => {
  if (name !== given.name) {
    throw new Error(`Cannot find module '${name}'`);
  }
  return loaded;
};
process.on("unhandledRejection", () => {});
process.on("uncaughtException", () => {});
for (const name of ["process", "fetch", "WebSocket", "EventSource", "navigator", "Deno", "Bun"]) {
  delete globalThis[name];
}

// The frames of cells, and those of the package without their folders.
const traceOf = (error) => {
  const lines = String(error.stack || error).split("\n");
  const frames = lines.filter((line) => /^ {4}at /.test(line) && !/node:|child_javascript|^\s+at \[/.test(line));
  const first = lines[0].startsWith("<cell ") ? 0 : lines.findIndex((line) => line.startsWith(error.name));
  const head = lines.slice(Math.max(0, first)).filter((line) => !/^ {4}at /.test(line));
  return [...head, ...frames.map((line) => line.replace(/(\(|at )[^()\s]*\/([^()/]+)/, "$1$2"))].join("\n");
};

const settled = async (value) => {
  if (!util.types.isPromise(value)) {
    return value;
  }
  return Promise.race([value, new Promise((resolve) => timeout(() => resolve(value), PENDING_MS))]);
};

const main = async () => {
  for (const [index, code] of given.cells.entries()) {
    const number = index + 1;
    pieces = { stdout: [], stderr: [] };
    const results = [];
    let failure = null;
    try {
      const script = new vm.Script(code, { filename: `<cell ${number}>` });
      const value = await settled(script.runInThisContext({ timeout: MOST_MS }));
      if (value !== undefined) {
        results.push({ text: util.inspect(value, { depth: 6, maxArrayLength: 50 }), is_main_result: true });
      }
    } catch (error) {
      const isError = util.types.isNativeError(error);
      const text = isError ? String(error.message) : util.inspect(error);
      failure = { name: isError ? error.name : "Uncaught", value: text, traceback: isError ? traceOf(error) : text };
    }
    output(JSON.stringify([0, { results, logs: pieces, error: failure, execution_count: number }]) + "\n");
  }
};
main().then(() => exit(0));
