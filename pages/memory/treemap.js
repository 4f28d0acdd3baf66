"use strict";

/* Treemaps: rectangles whose areas are bytes, as nearly square as can be. */

/**
 * Return a rectangle {x, y, width, height} for each of `sizes`, which are decreasing and above 0, inside `box`.
 * Rows are filled along the shorter side as long as that makes them squarer: Bruls, Huizing and van Wijk,
 * "Squarified Treemaps", 2000.
 */
function squarified(sizes, box) {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  const areas = sizes.map((size) => (size / total) * box.width * box.height);
  const placed = [];
  let { x, y, width, height } = box;
  for (let start = 0; start < areas.length; ) {
    const side = Math.min(width, height);
    let end = start + 1;
    let sum = areas[start];
    while (end < areas.length && worst(areas, start, end + 1, sum + areas[end], side) <= worst(areas, start, end, sum, side)) {
      sum += areas[end];
      end += 1;
    }
    const thick = side > 0 ? sum / side : 0;
    let along = 0;
    for (let i = start; i < end; i += 1) {
      const long = thick > 0 ? areas[i] / thick : 0;
      placed.push(width >= height
        ? { x, y: y + along, width: thick, height: long }
        : { x: x + along, y, width: long, height: thick });
      along += long;
    }
    if (width >= height) [x, width] = [x + thick, width - thick];
    else [y, height] = [y + thick, height - thick];
    start = end;
  }
  return placed;
}

/** Return how far the least square of a row of areas is from a square: 1 is one. */
function worst(areas, start, end, sum, side) {
  const thick = sum / side;
  let most = 0;
  for (let i = start; i < end; i += 1) {
    const long = areas[i] / thick;
    most = Math.max(most, long / thick, thick / long);
  }
  return most;
}

/**
 * Return the drawing of a node: a part for each child, and in it a cell for each op, in the colour of that op.
 *
 * `share` is the part of the whole width and height to use, so that several drawings have one scale; `open(path)` is
 * called for a part with children of its own.
 */
function treemapOf(node, { width, height, share, colour, open, title }) {
  const box = { x: 0, y: 0, width: width * share, height: height * share };
  const parts = childrenOf(node).filter((child) => child.bytes > 0);
  const places = squarified(parts.map((part) => part.bytes), box);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": title },
    svg("rect", { class: "empty", x: 0.5, y: 0.5, width: width - 1, height: height - 1 }),
    ...parts.map((part, i) => partOf(part, places[i], node.bytes, colour, open)));
}

function partOf(part, place, whole, colour, open) {
  const text = `${part.name}: ${sizeText(part.bytes)}, ${shareText(part.bytes, whole)}`;
  const inside = part.children.size > 0;
  const role = inside ? { role: "button", tabindex: 0, "aria-label": `${text}, open` } : { role: "img", "aria-label": text };
  const group = svg("g", role,
    svg("title", {}, text),
    ...cells(part, place, colour),
    svg("rect", { class: "part-edge", ...place }),
    ...names(part, place));
  if (inside) {
    group.addEventListener("click", () => open(part.path));
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      open(part.path);
    });
  }
  return group;
}

/** Return a cell for each op of a part, and the op's name where it has room below the part's own. */
function cells(part, place, colour) {
  const ops = [...part.ops].filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  const places = squarified(ops.map(([, bytes]) => bytes), place);
  const own = names(part, place);
  const right = place.x + 8 + 7.4 * Math.max(0, ...own.map((line) => line.textContent.length));
  return ops.flatMap(([op], i) => {
    const cell = svg("rect", { class: "cell", ...places[i] });
    cell.style.fill = colour(op);
    const { x, y, width, height } = places[i];
    const isCrossed = y + height - 17 < place.y + 6 + 17 * own.length; // by the part's name, which may be wider than its cell
    const left = Math.max(x + 6, isCrossed ? right : 0);
    const name = op === part.name || height < 18 ? "" : fitted(op, x + width - 4 - left);
    return name ? [cell, svg("text", { class: "name of-op", x: left, y: y + height - 6 }, name)] : [cell];
  });
}

/** Return a name of at most `width` pixels at 6.8 a character, cut off where it must be; nothing where little of it is left. */
function fitted(name, width) {
  const most = Math.floor(width / 6.8);
  if (name.length <= most) return name;
  return most >= 8 ? `${name.slice(0, most - 1)}…` : "";
}

/** Return the name and the bytes of a part where they have room, at 7 pixels a character or so. */
function names(part, { x, y, width, height }) {
  const lines = [part.name, sizeText(part.bytes)];
  if (height < 20 || width < 7.4 * lines[0].length + 12) return [];
  const shown = height < 38 || width < 7.4 * lines[1].length + 12 ? lines.slice(0, 1) : lines;
  return shown.map((line, i) => svg("text", { class: "name", x: x + 7, y: y + 18 + 17 * i, "font-weight": i === 0 ? 600 : 400 }, line));
}
