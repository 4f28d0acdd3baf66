"use strict";

/* The page: which method stands beside the exact model, which part of the model is open, and what is drawn of them. */

const TINTS = 8;
const element = (id) => document.getElementById(id);

let memory = null; // of memory_page.py: target, parameters, batch, states, marks
let chosen = 1; // index of the method among the states
let group = "module";
let path = "";
let timeline = null;

/** Take the data, which stands in the last script of the page. */
function receiveMemory(data) {
  memory = data;
  const best = memory.states.findIndex((state, i) => i > 0 && state.bytes === Math.min(...memory.states.slice(1).map((s) => s.bytes)));
  chosen = Math.max(1, best);
  document.title = `${memory.target}: memory of a training step`;
  element("title").textContent = `Memory of a training step: ${memory.target}`;
  element("subtitle").textContent = `${memory.parameters.toLocaleString("en")} parameters (${sizeText(memory.parameter_bytes)}), a batch of ${memory.batch}`;
  element("timeline-section").hidden = !memory.marks;
  path = firstPath(treeOf(memory.states[0].rows, group));
  connect();
  showWhatScrolls();
  drawAtWidth(element("map-exact"), () => showMaps());
  if (memory.marks) drawAtWidth(element("timeline"), () => showTimeline());
  show();
}

const states = () => [memory.states[0], memory.states[chosen]];

function connect() {
  element("methods").tBodies[0].replaceChildren(...memory.states.map(methodRow));
  const input = (value, text) => {
    const radio = html("input", { type: "radio", name: "group", id: `group-${value}`, value, checked: value === group });
    radio.addEventListener("change", () => { group = value; open(value === "module" ? firstPath(treeOf(memory.states[0].rows, value)) : ""); });
    return html("span", {}, radio, html("label", { for: radio.id }, text));
  };
  element("group").replaceChildren(input("module", "module"), input("op", "op"));
  if (!memory.marks) return;
  element("moment").max = memory.marks.length - 1;
  element("moment").value = Math.max(0, memory.marks.findIndex(([, event]) => event === "backward"));
  element("moment").addEventListener("input", showMoment);
  element("timeline").addEventListener("pointermove", (event) => {
    element("moment").value = timeline.markAt(event.clientX - element("timeline").getBoundingClientRect().left);
    showMoment();
  });
}

/** Return a row of the table of methods; all but the exact model can be chosen. */
function methodRow(state, i) {
  const exact = memory.states[0];
  let head = state.name;
  if (i > 0) {
    const radio = html("input", { type: "radio", name: "method", id: `method-${i}`, checked: i === chosen });
    radio.addEventListener("change", () => { chosen = i; show(); });
    head = html("label", {}, radio, state.name);
  }
  return html("tr", {}, html("th", { scope: "row" }, head),
    html("td", {}, sizeText(state.bytes)), html("td", {}, share(state.bytes, exact.bytes)),
    html("td", {}, sizeText(state.peak)), html("td", {}, share(state.peak, exact.peak)));
}

function share(part, whole) {
  if (!whole || part === null) return "–";
  const width = Math.min(100, (100 * part) / whole);
  const bar = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "track", width: 100, height: 10 }), svg("rect", { class: "part", width, height: 10 }));
  return html("span", { class: "share" }, bar, html("span", {}, shareText(part, whole)));
}

// ---- what is shown ---------------------------------------------------------------------------------------------------

function show() {
  const [, method] = states();
  for (const [i, row] of [...element("methods").tBodies[0].rows].entries()) row.classList.toggle("chosen", i === chosen);
  element("notes").replaceChildren(...method.notes.map((note) => html("p", {}, note)));
  element("legend-method").textContent = method.name;
  element("left").replaceChildren(...method.left.map((row) => html("tr", {}, ...row.map((cell) => html("td", { class: "text" }, cell)))));
  element("left-details").hidden = method.left.length === 0;
  showLegend();
  showMaps();
  if (memory.marks) showTimeline();
}

/** Open another part of the model; the focus stays with the drawings, whose parts are new. */
function open(next) {
  const inMaps = element("map-exact").contains(document.activeElement) || element("map-method").contains(document.activeElement);
  path = next;
  showMaps();
  if (inMaps || element("path").contains(document.activeElement)) element("path").lastElementChild.firstElementChild.focus();
}

/** Return the function from an op to its colour: the ops of most bytes have a tint of their own. */
function colours() {
  const ranks = new Map(opsOf(states().flatMap((state) => state.rows)).map(([op], i) => [op, i]));
  return (op) => (ranks.get(op) < TINTS ? `var(--t${ranks.get(op)})` : "var(--rest)");
}

function showLegend() {
  const ops = opsOf(states().flatMap((state) => state.rows));
  const colour = colours();
  const item = (text, fill) => {
    const square = html("i");
    square.style.background = fill;
    return html("li", {}, square, ` ${text}`);
  };
  element("legend").replaceChildren(
    ...ops.slice(0, TINTS).map(([op]) => item(op, colour(op))),
    ...(ops.length > TINTS ? [item(`${ops.length - TINTS} other ops`, "var(--rest)")] : []));
}

function showMaps() {
  const trees = states().map((state) => treeOf(state.rows, group));
  const at = opened(trees, path);
  const nodes = trees.map((tree) => nodeAt(tree, at));
  const most = Math.max(...nodes.map((node) => node?.bytes ?? 0), 1);
  for (const [i, side] of ["exact", "method"].entries()) {
    const [node, name] = [nodes[i], states()[i].name];
    const width = element(`map-${side}`).clientWidth;
    const bytes = node?.bytes ?? 0;
    const title = `${name}: ${sizeText(bytes)} kept${at ? ` by ${nameOf(at)}` : ""}`;
    element(`caption-${side}`).replaceChildren(`${name}: ${sizeText(bytes)}`,
      html("small", {}, i ? `  ${shareText(bytes, nodes[0]?.bytes)} of exact` : ""));
    const share = Math.sqrt(bytes / most);
    element(`map-${side}`).replaceChildren(treemapOf(node, { width, height: Math.round(width * 0.72), share, colour: colours(), open, title }));
  }
  showPath(at);
  showParts(nodes);
}

const nameOf = (at) => at.slice(1).replaceAll("/", group === "module" ? "." : ", ");

/** Show the way from the model to the open part: all before it are buttons. */
function showPath(at) {
  const names = at.split("/").slice(1);
  const steps = [["all", ""], ...names.map((name, i) => [name, `/${names.slice(0, i + 1).join("/")}`])];
  element("path").replaceChildren(...steps.map(([name, to], i) => {
    if (i === steps.length - 1) return html("li", {}, html("span", { "aria-current": "true", tabindex: -1 }, name));
    const button = html("button", { type: "button" }, name);
    button.addEventListener("click", () => open(to));
    return html("li", {}, button);
  }));
}

function showParts(nodes) {
  const heads = [group === "module" ? "Part" : "Op", "exact", states()[1].name, "saved"];
  element("part-heads").replaceChildren(...heads.map((head, i) => html("th", { scope: "col", class: i ? null : "text" }, head)));
  const names = [...new Set(nodes.flatMap((node) => childrenOf(node).map((child) => child.name)))];
  const row = (name, [before, after]) => html("tr", {}, html("th", { scope: "row" }, name),
    html("td", {}, sizeText(before)), html("td", {}, sizeText(after)), html("td", {}, shareText(before - after, before)));
  const bytes = (name) => nodes.map((node) => node?.children.get(name)?.bytes ?? 0);
  element("parts").replaceChildren(
    ...names.map((name) => row(name, bytes(name))),
    row("all of these", nodes.map((node) => node?.bytes ?? 0)));
}

function showTimeline() {
  const [exact, method] = states();
  const title = `Memory through the step. Exact: at most ${sizeText(exact.peak)}; ${method.name}: at most ${sizeText(method.peak)}.`;
  timeline = timelineOf({ exact: exact.timeline, method: method.timeline, marks: memory.marks }, element("timeline").clientWidth, title);
  element("timeline").replaceChildren(timeline.drawing);
  showMoment();
}

function showMoment() {
  const i = Number(element("moment").value);
  timeline.mark(i);
  const parts = [markText(memory.marks[i]), ...states().map((state) => `${state.name} ${sizeText(state.timeline.at[i])}`)];
  element("reading").replaceChildren(...parts.map((part) => html("span", {}, part)));
  element("moment").setAttribute("aria-valuetext", parts.join(", "));
}
