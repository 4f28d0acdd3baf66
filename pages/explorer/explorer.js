"use strict";

/* The page: what is chosen, where its data comes from, and what is shown of it.

   `choice` is the only thing that changes by hand; it is in the address too, so that a link shows the same table. */

const LANGUAGES = { python: "Python", c: "C", cuda: "CUDA", json: "JSON" };
const solver = document.documentElement.dataset.solver;
const element = (id) => document.getElementById(id);

let index = null; // what can be chosen; of explorer_data.index()
let choice = null; // {activation, kind, weight, bits}
let shown = null; // {curve, inputs, table, sources}: what is drawn
let chart = null; // the drawing, to move its cursor
let language = "python";

// ---- data: scripts call these functions, since a page opened from disk cannot fetch ----------------------------------

const arrived = { activations: new Map(), sources: new Map() };

function receiveIndex(value) { index = value; }
function receiveActivation(value) { arrived.activations.set(value.name, value); }
function receiveSources(name, packed) { arrived.sources.set(name, packed); }

/** Load a script of data. */
function load(path) {
  return new Promise((resolve, reject) => {
    const script = html("script", { src: path });
    script.onload = () => { script.remove(); resolve(); };
    script.onerror = () => { script.remove(); reject(new Error(`cannot load ${path}`)); };
    document.head.append(script);
  });
}

async function activationOf(name) {
  if (!arrived.activations.has(name)) await load(`data/${name}.js`);
  return arrived.activations.get(name);
}

/** Return the source code of the tables of an activation, in their order. */
async function sourcesOf(name) {
  if (!arrived.sources.has(name)) await load(`sources/${name}.js`);
  const packed = arrived.sources.get(name);
  if (typeof packed === "string") arrived.sources.set(name, JSON.parse(await unpacked(packed)));
  return arrived.sources.get(name);
}

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

/** Return {curve, inputs, table, sources()} of a choice: shipped, or solved if there is a solver; an error in one line. */
async function find(chosen) {
  if (index.activations.includes(chosen.activation) && chosen.weight in index.weights) {
    const { curve, tables } = await activationOf(chosen.activation);
    const table = tableFor(tables, chosen);
    if (table) {
      const sources = async () => (await sourcesOf(chosen.activation))[tables.indexOf(table)];
      return { name: chosen.activation, curve, inputs: index.weights[chosen.weight], table, sources };
    }
  }
  return solved(chosen);
}

const answers = new Map();

async function solved(chosen) {
  if (!solver) throw new Error(`There is no shipped table for this; fewbit explore solves it.`);
  const question = JSON.stringify(chosen);
  if (!answers.has(question)) {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: question };
    const reply = await fetch(solver, options).catch(() => { throw new Error("The server does not answer: is fewbit explore still running?"); });
    const answer = await reply.json();
    if (!reply.ok) throw new Error(answer.error);
    answers.set(question, answer);
  }
  const { name, curve, weight, table, sources } = answers.get(question);
  return { name, curve, inputs: weight, table, sources: async () => sources };
}

// ---- the choice ------------------------------------------------------------------------------------------------------

/** Return the choice that the address names, as far as it names one. */
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const bits = Number(given.get("bits"));
  return {
    activation: given.get("activation") || index.first.activation,
    kind: index.kinds.includes(given.get("kind")) ? given.get("kind") : index.first.kind,
    weight: given.get("weight") || index.first.weight,
    bits: Number.isInteger(bits) && bits >= 1 && bits <= 8 ? bits : index.first.bits,
  };
}

function addressOf(chosen) {
  return `#${new URLSearchParams(Object.entries(chosen).map(([name, value]) => [name, `${value}`]))}`;
}

let latest = 0; // of the requests: an answer that comes after a later request is dropped

/** Show another choice; until its table is there, the former one stays. Returns whether it is shown. */
async function choose(next) {
  const request = ++latest;
  const previous = choice;
  choice = next;
  history.replaceState(null, "", addressOf(next));
  const added = setControls(next);
  say("");
  const slow = setTimeout(() => say("Solving; the first time takes some seconds…"), 400);
  element("solve-button").disabled = true;
  try {
    const found = await find(next);
    if (request !== latest) return false;
    shown = found;
    // The solver returns the canonical spelling of a name and a weight.
    choice = { ...next, activation: found.name, weight: found.table.weight };
    setControls(choice);
    history.replaceState(null, "", addressOf(choice));
    clearTimeout(slow);
    say("");
    show();
    return true;
  } catch (error) {
    clearTimeout(slow);
    if (request !== latest) return false;
    say(error.message, true);
    if (previous && shown) {
      choice = previous;
      setControls(previous);
      history.replaceState(null, "", addressOf(previous));
    }
    return false;
  } finally {
    clearTimeout(slow);
    // What has no table, or another spelling, is not offered again.
    for (const option of added) if (!option.selected) option.remove();
    if (request === latest) element("solve-button").disabled = false;
  }
}

function say(text, bad = false) {
  element("status").textContent = text;
  element("status").classList.toggle("bad", bad);
}

// ---- controls --------------------------------------------------------------------------------------------------------

/** Fill a row of radio buttons; `pick` is called with the value of the one that is chosen. */
function segments(id, options, pick) {
  element(id).replaceChildren(...options.map(([value, text, spoken]) => {
    const input = html("input", { type: "radio", name: id, id: `${id}-${value}`, value, "aria-label": spoken });
    input.addEventListener("change", () => pick(value));
    return html("span", {}, input, html("label", { for: input.id }, text));
  }));
}

function options(id, values) {
  element(id).replaceChildren(...values.map((value) => html("option", { value }, value)));
}

/** Set the controls to a choice; return the options that had to be added to the lists. */
function setControls({ activation, kind, weight, bits }) {
  const added = [];
  for (const [id, value] of [["activation", activation], ["weight", weight]]) {
    const select = element(id);
    if (![...select.options].some((option) => option.value === value)) {
      const option = html("option", { value }, value);
      select.append(option);
      added.push(option);
    }
    select.value = value;
  }
  element(`bits-${bits}`).checked = true;
  element(`kind-${kind}`).checked = true;
  element("kind-text").textContent = KIND_TEXTS[kind];
  return added;
}

function connect() {
  options("activation", index.activations);
  options("weight", Object.keys(index.weights));
  segments("bits", [1, 2, 3, 4, 5, 6, 7, 8].map((n) => [n, `${n}`, n === 1 ? "1 bit" : `${n} bits`]), (bits) => choose({ ...choice, bits }));
  segments("kind", index.kinds.map((kind) => [kind, kind]), (kind) => choose({ ...choice, kind }));
  segments("language", Object.entries(LANGUAGES), (value) => { language = value; showSource(); });
  element("language-python").checked = true;
  element("activation").addEventListener("change", (event) => choose({ ...choice, activation: event.target.value }));
  element("weight").addEventListener("change", (event) => choose({ ...choice, weight: event.target.value }));
  element("choice").addEventListener("submit", (event) => event.preventDefault());
  element("solve").hidden = !solver;
  element("solver-text").hidden = Boolean(solver);
  element("solve").addEventListener("submit", async (event) => {
    event.preventDefault();
    const asked = { ...choice, activation: element("expression").value.trim(), weight: element("inputs").value.trim() };
    const found = await choose(asked);
    // The drawing, which on a phone is below the form; or what is wrong.
    const below = element("chart").getBoundingClientRect().bottom > innerHeight;
    if (!found) element("status").scrollIntoView({ block: "nearest" });
    else if (below) element("drawing").scrollIntoView({ block: "start" });
  });
  element("whole").addEventListener("change", show);
  element("cursor").addEventListener("input", showReading);
  element("chart").addEventListener("pointermove", (event) => {
    if (!chart) return;
    const x = chart.xOf(event.clientX - element("chart").getBoundingClientRect().left);
    const [low, high] = view();
    element("cursor").value = Math.round((1000 * (x - low)) / (high - low));
    showReading();
  });
  element("copy").addEventListener("click", copySource);
  window.addEventListener("hashchange", () => choose(fromAddress()));
  drawAtWidth(element("chart"), () => shown && showChart());
  showWhatScrolls();
}

// ---- what is shown ---------------------------------------------------------------------------------------------------

const view = () => viewOf(shown.curve, shown.table, element("whole").checked);

function show() {
  const { table } = shown;
  element("title").textContent = `${choice.activation}: ${counted(table.bits, "bit")}, kind ${table.kind}`;
  element("legend-table").textContent = table.kind === "stochastic" ? "levels it is rounded to" : "its table";
  element("command").textContent = commandOf(choice);
  showFacts(table);
  showRows();
  showChart();
  showSource();
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function showFacts(table) {
  const fact = (name, value, more) => html("div", {}, html("dt", {}, name), html("dd", {}, value, html("small", {}, more ? ` ${more}` : "")));
  element("facts").replaceChildren(
    fact(table.kind === "stochastic" ? "Error, the variance" : "Error", numberText(table.error), "∫ (f′ − q)² w dx"),
    fact("Proven lower bound", numberText(table.lower_bound), gapText(table)),
    fact("Levels", `${table.levels.length}`, `in ${counted(table.codes.length, "interval")}`),
    fact("Saved for backward", `${numberText((100 * table.bits) / 32, 3)} %`, "of float32"));
}

function showChart() {
  const holder = element("chart");
  chart = chartOf(shown, view(), holder.clientWidth, drawingText());
  holder.replaceChildren(chart.drawing);
  showReading();
}

/** Say in words what the drawing shows, for who does not see it. */
function drawingText() {
  const { table } = shown;
  const [low, high] = [Math.min(...table.levels), Math.max(...table.levels)];
  return `The derivative of ${choice.activation}, and its table of ${counted(table.levels.length, "level")} from `
    + `${numberText(low, 4)} to ${numberText(high, 4)}, over ${counted(table.codes.length, "interval")}; the inputs are `
    + `distributed as ${table.weight}. The table below has the numbers.`;
}

function showReading() {
  const [low, high] = view();
  const x = low + ((high - low) * element("cursor").value) / 1000;
  const reading = readingOf(shown.curve, shown.table, x);
  chart.mark(reading);
  const levels = reading.level === reading.orLevel ? numberText(reading.level, 5) : `${numberText(reading.level, 5)} or ${numberText(reading.orLevel, 5)}`;
  const parts = [`x = ${numberText(x, 4)}`, `f′ = ${numberText(reading.exact, 5)}`, `code ${reading.code}`, `level ${levels}`];
  element("reading").replaceChildren(...parts.map((part) => html("span", {}, part)));
  element("cursor").setAttribute("aria-valuetext", parts.join(", "));
  const row = intervalAt(shown.table, x);
  for (const [i, line] of [...element("rows").children].entries()) line.classList.toggle("here", i === row);
}

function showRows() {
  const { table, inputs } = shown;
  const random = table.kind === "stochastic";
  const heads = ["above", "up to", "code", "level", ...(random ? ["or level"] : []), "share of inputs"];
  element("heads").replaceChildren(...heads.map((head) => html("th", { scope: "col" }, head)));
  element("rows").replaceChildren(...intervalsOf(table).map((row) => {
    const share = shareBetween(inputs, row.above, row.upTo);
    const cells = [numberText(nearZero(row.above, table)), numberText(nearZero(row.upTo, table)), `${row.code}`, numberText(row.level),
      ...(random ? [numberText(row.orLevel)] : []), `${(100 * share).toFixed(1)} %`];
    return html("tr", {}, ...cells.map((cell) => html("td", {}, cell)));
  }));
}

// ---- source code -----------------------------------------------------------------------------------------------------

async function showSource() {
  element("copied").textContent = "";
  const now = shown;
  const sources = await now.sources().catch((error) => ({ error: error.message }));
  if (now !== shown) return;
  const text = sources[language] ?? sources.error;
  element("source").textContent = text ?? `A table of kind stochastic has no one value at x, which ${LANGUAGES[language]} code would return. JSON holds it.`;
  element("copy").disabled = text === undefined;
}

async function copySource() {
  try {
    await copyText(element("source").textContent);
    element("copied").textContent = "Copied.";
  } catch (error) {
    element("copied").textContent = `Not copied: ${error.message}.`;
  }
}

load("data/index.js").then(() => {
  connect();
  return choose(fromAddress());
}).catch((error) => say(error.message, true));
