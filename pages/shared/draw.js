"use strict";

/* What both pages draw with: elements, scales, ticks, numbers. No function here keeps anything. */

const SVG = "http://www.w3.org/2000/svg";

/** Return an element of SVG with attributes and children; children are nodes or text, never markup. */
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Return an element of HTML with attributes and children. */
function html(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Return the function that maps low…high to from…to, linearly. */
function scaleOf(low, high, from, to) {
  const factor = (to - from) / (high - low || 1);
  return (value) => from + (value - low) * factor;
}

/** Return round numbers between low and high, about `count` of them, at steps of 1, 2 or 5 times a power of `base`. */
function ticksOf(low, high, count, base = 10) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const factors = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  const step = power * factors.find((factor) => factor * power >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

/** Return the text of a number for a reader: `digits` significant ones, a true minus, no trailing zeros. */
function numberText(value, digits = 6) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size < 1e-4 || size >= 1e7 ? value.toExponential(Math.max(0, digits - 3)) : `${Number(value.toPrecision(digits))}`;
  return text.replaceAll("-", "−");
}

/** Return the number of values in the sorted list that are below `x` (of equal ones, none is). */
function countBelow(sorted, x) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Return y at x on the line through the points (xs[i], ys[i]); null where a neighbour is null. */
function lineAt(xs, ys, x) {
  const right = Math.min(Math.max(countBelow(xs, x), 1), xs.length - 1);
  const [a, b, u, v] = [xs[right - 1], xs[right], ys[right - 1], ys[right]];
  if (u === null || v === null) return null;
  const part = b === a ? 1 : Math.min(1, Math.max(0, (x - a) / (b - a)));
  return u + part * (v - u);
}

/** Return the path of a line through points [x, y]; it is broken where y is null. */
function pathOf(points) {
  let pen = "M";
  let path = "";
  for (const [x, y] of points) {
    if (y === null) pen = "M";
    else {
      path += `${pen}${x.toFixed(2)} ${y.toFixed(2)}`;
      pen = "L";
    }
  }
  return path;
}

/** Call `draw(width)` now and whenever the width of `element` changes. */
function drawAtWidth(element, draw) {
  let drawn = 0;
  const again = () => {
    const width = Math.round(element.clientWidth);
    if (width > 0 && width !== drawn) draw((drawn = width));
  };
  new ResizeObserver(again).observe(element);
  again();
}

/** Mark each frame that scrolls by the sides beyond which it goes on, now and whenever it scrolls or changes. */
function showWhatScrolls() {
  const sides = (frame) => {
    const rest = frame.scrollWidth - frame.clientWidth - frame.scrollLeft;
    frame.classList.toggle("more-left", frame.scrollLeft > 1);
    frame.classList.toggle("more-right", rest > 1);
  };
  for (const frame of document.querySelectorAll(".scroll")) {
    const again = () => sides(frame);
    frame.addEventListener("scroll", again, { passive: true });
    const observer = new ResizeObserver(again);
    for (const each of [frame, ...frame.children]) observer.observe(each);
    new MutationObserver(again).observe(frame, { childList: true, subtree: true, characterData: true });
    again();
  }
}

/** Put text on the clipboard; a page without that right, such as one opened from disk, selects and copies. */
async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = html("textarea", { class: "hidden-text", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser does not allow it");
}
