"use strict";

/* The drawing: f′ and its table, the code of each interval, and a histogram of the inputs, above one axis of x. */

const MARGIN = { left: 46, right: 10, top: 8 };
const STRIP = 26;
const HISTOGRAM = 64;

/**
 * Return the drawing of {curve, inputs, table}.
 * It has `xOf(pixel)` and `mark(reading)`, for the cursor to follow a pointer or the slider.
 */
function chartOf({ curve, inputs, table }, view, width, title) {
  const height = Math.max(200, Math.min(340, width * 0.5));
  const range = rangeOf(curve, table, view);
  const x = scaleOf(...view, MARGIN.left, width - MARGIN.right);
  const y = scaleOf(...range, MARGIN.top + height, MARGIN.top);
  const strip = MARGIN.top + height + 6;
  const floor = strip + STRIP + 8 + HISTOGRAM;
  const inside = `plot-${view.join("_")}-${width}`.replace(/[^\w-]/g, "_");
  const clip = svg("clipPath", { id: inside },
    svg("rect", { x: MARGIN.left, y: MARGIN.top, width: width - MARGIN.left - MARGIN.right, height }));
  const cursor = svg("g", { visibility: "hidden" });
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${floor + 40}`, height: floor + 40, role: "img", "aria-label": title },
    clip,
    ...yAxis(range, y, width),
    ...xAxis(view, x, floor, width),
    ...cuts(table, view, x, floor),
    ...bars(inputs, view, x, floor, width),
    svg("g", { "clip-path": `url(#${inside})` }, ...lines(curve, table, view, x, y)),
    ...tiles(table, view, x, strip),
    cursor);
  return {
    drawing,
    xOf: scaleOf(MARGIN.left, width - MARGIN.right, ...view),
    mark: (reading) => mark(cursor, reading, x, y, floor),
  };
}

function yAxis(range, y, width) {
  return ticksOf(...range, 5).flatMap((value) => [
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, numberText(value, 3)),
  ]);
}

function xAxis(view, x, floor, width) {
  return [
    svg("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: floor, y2: floor }),
    ...ticksOf(...view, width / 65).flatMap((value) => [
      svg("line", { class: "axis", x1: x(value), x2: x(value), y1: floor, y2: floor + 4 }),
      svg("text", { class: "tick", x: x(value), y: floor + 18, "text-anchor": "middle" }, numberText(value, 4)),
    ]),
    svg("text", { class: "tick", x: (MARGIN.left + width - MARGIN.right) / 2, y: floor + 36, "text-anchor": "middle" }, "x"),
  ];
}

/** Return vertical lines where codes change; none where they would be a grey field. */
function cuts(table, view, x, floor) {
  const seen = table.boundaries.filter((cut) => cut > view[0] && cut < view[1]);
  if (seen.length > 40) return [];
  return seen.map((cut) => svg("line", { class: "cut", x1: x(cut), x2: x(cut), y1: MARGIN.top, y2: floor }));
}

function lines(curve, table, view, x, y) {
  const rows = intervalsOf(table).filter((row) => row.upTo >= view[0] && row.above <= view[1]);
  const steps = (field) => rows.flatMap((row) => [
    [x(Math.max(row.above, view[0])), y(row[field])],
    [x(Math.min(row.upTo, view[1])), y(row[field])],
  ]);
  const shown = curve.x.map((at, i) => [x(at), curve.y[i] === null ? null : y(curve.y[i])]);
  const exact = svg("path", { class: "curve", d: pathOf(shown) });
  if (table.kind !== "stochastic") return [svg("path", { class: "table", d: pathOf(steps("level")) }), exact];
  const band = [...steps("level"), ...steps("orLevel").reverse()];
  return [
    svg("path", { class: "band", d: `${pathOf(band)}Z` }),
    svg("path", { class: "table", d: pathOf(steps("level")) }),
    svg("path", { class: "table", d: pathOf(steps("orLevel")) }),
    exact,
  ];
}

/** Return a tile for each interval, in the colour of its level, with its code where that has room. */
function tiles(table, view, x, top) {
  const [least, most] = [Math.min(...table.levels), Math.max(...table.levels)];
  const part = scaleOf(least, most, 0, 100);
  return intervalsOf(table)
    .filter((row) => row.upTo > view[0] && row.above < view[1])
    .flatMap((row) => {
      const [left, right] = [x(Math.max(row.above, view[0])), x(Math.min(row.upTo, view[1]))];
      const tile = svg("rect", { class: right - left > 4 ? "tile" : null, x: left, width: Math.max(right - left, 0.5), y: top, height: STRIP });
      tile.style.fill = `color-mix(in oklab, var(--high) ${part(row.level).toFixed(1)}%, var(--low))`;
      const roomy = right - left > 9 * `${row.code}`.length + 4;
      const label = roomy && svg("text", { x: (left + right) / 2, y: top + 18, "text-anchor": "middle" }, `${row.code}`);
      return label ? [tile, label] : [tile];
    });
}

function bars(inputs, view, x, floor, width) {
  const bins = histogramOf(inputs, view, Math.max(16, Math.round(width / 14)));
  const most = Math.max(...bins.map((bin) => bin.share)) || 1;
  return bins.map(({ low, high, share }) => {
    const tall = (share / most) * HISTOGRAM;
    return svg("rect", { class: "bar", x: x(low) + 0.5, width: Math.max(x(high) - x(low) - 1, 0.5), y: floor - tall, height: tall });
  });
}

function mark(cursor, reading, x, y, floor) {
  const at = x(reading.x);
  const dots = [
    [reading.exact, "of-curve"],
    [reading.level, "of-table"],
    [reading.orLevel, "of-table"],
  ].filter(([value]) => value !== null);
  cursor.setAttribute("visibility", "visible");
  cursor.replaceChildren(
    svg("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: floor }),
    ...dots.map(([value, name]) => svg("circle", { class: `dot ${name}`, cx: at, cy: y(value), r: 5.5 })));
}
