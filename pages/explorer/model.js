"use strict";

/* What the page computes, without a document: a table is {kind, bits, weight, error, lower_bound, boundaries, codes,
   levels} as explorer_data.py gives it. Intervals are open on the left and closed on the right. */

const KIND_TEXTS = {
  shared: "Several intervals may share a level, so that the levels go where they serve most.",
  interval: "Each interval has a level of its own, as in the paper.",
  stochastic: "f′(x) is rounded at random to the level below or above, so that gradients have no bias.",
};

/** Return the table that serves at most `bits` bits: an exact one may need fewer (ReLU). Null if there is none. */
function tableFor(tables, { kind, weight, bits }) {
  const fit = tables.filter((table) => table.kind === kind && table.weight === weight && table.bits <= bits);
  return fit.find((table) => table.error === 0) ?? fit.find((table) => table.bits === bits) ?? null;
}

/** Return the intervals of a table as rows: their ends, code, level, and the other level that kind stochastic may take. */
function intervalsOf(table) {
  const ends = [-Infinity, ...table.boundaries, Infinity];
  return table.codes.map((code, i) => ({
    above: ends[i],
    upTo: ends[i + 1],
    code,
    level: table.levels[code],
    orLevel: table.levels[table.kind === "stochastic" ? Math.min(code + 1, table.levels.length - 1) : code],
  }));
}

/** Return 0 for a boundary that is 0 but for rounding, else the boundary itself. */
function nearZero(boundary, table) {
  const largest = Math.max(...table.boundaries.map(Math.abs));
  return Math.abs(boundary) < 1e-12 * largest ? 0 : boundary;
}

/** Return the index of the interval that holds x. */
function intervalAt(table, x) {
  return countBelow(table.boundaries, x);
}

/** Return the share of the inputs in (low, high], by the points of `inputs`. */
function shareBetween(inputs, low, high) {
  const below = (x) => (x === -Infinity ? 0 : x === Infinity ? 1 : lineAt(inputs.x, inputs.share, x));
  return Math.max(0, below(high) - below(low));
}

/** Return equal bins between the ends of a view, each with its share of the inputs. */
function histogramOf(inputs, [low, high], count) {
  const at = (i) => low + ((high - low) * i) / count;
  return Array.from({ length: count }, (_, i) => ({
    low: at(i),
    high: at(i + 1),
    share: shareBetween(inputs, at(i), at(i + 1)),
  }));
}

/** Return the part of the line to draw: all of the curve, or where codes change and half as much on either side. */
function viewOf(curve, table, whole) {
  const [first, last] = [curve.x[0], curve.x[curve.x.length - 1]];
  const cuts = table.boundaries.filter((x) => x > first && x < last);
  if (whole || cuts.length === 0) return [first, last];
  const [low, high] = [cuts[0], cuts[cuts.length - 1]];
  const margin = Math.max(0.4 * (high - low), (last - first) / 12);
  return [Math.max(first, low - margin), Math.min(last, high + margin)];
}

/** Return the range of y to draw: all levels, and of a curve without bounds what is not far from them. */
function rangeOf(curve, table, [low, high]) {
  const [least, most] = [Math.min(...table.levels), Math.max(...table.levels)];
  const room = most - least || Math.abs(most) || 1;
  const seen = curve.y.filter((y, i) => y !== null && curve.x[i] >= low && curve.x[i] <= high);
  const inside = seen.filter((y) => y > least - room && y < most + room);
  const [bottom, top] = [Math.min(least, ...inside), Math.max(most, ...inside)];
  const margin = 0.06 * (top - bottom || 1);
  return [bottom - margin, top + margin];
}

/** Return what the page says of x: f′, the code and the table's value. */
function readingOf(curve, table, x) {
  const { code, level, orLevel } = intervalsOf(table)[intervalAt(table, x)];
  return { x, exact: lineAt(curve.x, curve.y, x), code, level, orLevel };
}

/** Return the name of a problem, and the command that gives its table. */
function commandOf({ activation, kind, weight, bits }) {
  const quoted = /^[\w.,:-]+$/.test(activation) ? activation : `"${activation}"`;
  const options = [`--bits ${bits}`, ...(kind === "shared" ? [] : [`--kind ${kind}`])];
  if (weight !== "uniform:-10,10") options.push(`--weight "${weight}"`);
  return `fewbit solve ${quoted} ${options.join(" ")}`;
}

/** Return how far the bound lies below the error, as a text. */
function gapText({ error, lower_bound: bound }) {
  if (error === 0) return "exact: no error at all";
  if (bound === null) return "not computed";
  const gap = (error - bound) / error;
  return gap > 0 ? `${numberText(100 * gap, 2)} % below the error` : "equal to the error";
}
