"use strict";

/* The memory through a step, exact and by a method, over the marks that both have: from left to right a module's forward
   pass begins or ends, and then its backward pass begins. Between two marks stands the most that was held there. */

const EDGE = { left: 68, right: 10, top: 22, bottom: 34 };
const WORDS = {
  enter: (module) => `forward pass of ${module} begins`,
  leave: (module) => `forward pass of ${module} ends`,
  backward: (module) => `backward pass of ${module} begins`,
};

/** Return what a mark says. */
function markText([module, event]) {
  return WORDS[event](module || "the model");
}

/** Return the points [x, bytes] of a timeline: at each mark, and halfway to the next one. */
function pointsOf({ at, most }) {
  return at.flatMap((bytes, i) => [[i, bytes], [i + 0.5, most[i]]]);
}

/** Return the drawing of the timelines `exact` and `method`, with `mark(i)` and `markAt(pixel)` for its cursor. */
function timelineOf({ exact, method, marks }, width, title) {
  const height = Math.max(180, Math.min(320, width * 0.42));
  const bottom = EDGE.top + height;
  const most = Math.max(...exact.most, ...method.most, 1);
  const x = scaleOf(0, marks.length - 0.5, EDGE.left, width - EDGE.right);
  const y = scaleOf(0, most * 1.04, bottom, EDGE.top);
  const path = (timeline) => pathOf(pointsOf(timeline).map(([at, bytes]) => [x(at), y(bytes)]));
  const cursor = svg("g", { visibility: "hidden" });
  const turn = marks.findIndex(([, event]) => event === "backward");
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${bottom + EDGE.bottom}`, height: bottom + EDGE.bottom, role: "img", "aria-label": title },
    ...ticksOf(0, most, 5, 1024).flatMap((bytes) => [
      svg("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(bytes), y2: y(bytes) }),
      svg("text", { class: "tick", x: EDGE.left - 8, y: y(bytes) + 4, "text-anchor": "end" }, sizeText(bytes)),
    ]),
    svg("path", { class: "under", d: `${path(method)}L${x(marks.length - 0.5)} ${bottom}L${x(0)} ${bottom}Z` }),
    ...passes(turn, marks.length, x, bottom),
    svg("path", { class: "exact", d: path(exact) }),
    svg("path", { class: "method", d: path(method) }),
    svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: bottom, y2: bottom }),
    cursor);
  return {
    drawing,
    markAt: (pixel) => Math.round(scaleOf(EDGE.left, width - EDGE.right, 0, marks.length - 0.5)(pixel)),
    mark: (i) => {
      cursor.setAttribute("visibility", "visible");
      cursor.replaceChildren(
        svg("line", { class: "cursor", x1: x(i), x2: x(i), y1: EDGE.top, y2: bottom }),
        svg("circle", { class: "dot of-exact", cx: x(i), cy: y(exact.at[i]), r: 5 }),
        svg("circle", { class: "dot of-method", cx: x(i), cy: y(method.at[i]), r: 5 }));
    },
  };
}

/** Return the line between both passes, and their names below. */
function passes(turn, count, x, bottom) {
  if (turn < 0) return [];
  const name = (text, from, to) => svg("text", { class: "tick", x: (x(from) + x(to)) / 2, y: bottom + 20, "text-anchor": "middle" }, text);
  return [
    svg("line", { class: "passes", x1: x(turn), x2: x(turn), y1: EDGE.top, y2: bottom + 6 }),
    name("forward pass", 0, turn),
    name("backward pass", turn, count - 0.5),
  ];
}
