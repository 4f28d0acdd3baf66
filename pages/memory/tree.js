"use strict";

/* The bytes of a state as a tree: of modules, with ops as leaves, or of ops, with classes of modules as leaves.

   A node is {name, path, bytes, ops, children}: `ops` maps each op below it to its bytes, `path` names it in any state. */

const GROUPS = {
  module: ([module, , op]) => [...(module ? module.split(".") : []), op],
  op: ([, kind, op, dtype]) => [op, kind, dtype],
};

/** Return the tree of the rows [module, kind, op, dtype, bytes]. */
function treeOf(rows, group) {
  const root = { name: "", path: "", bytes: 0, ops: new Map(), children: new Map() };
  for (const row of rows) {
    const [op, bytes] = [row[2], row[4]];
    let node = root;
    add(node, op, bytes);
    for (const name of GROUPS[group](row)) {
      const path = `${node.path}/${name}`;
      if (!node.children.has(name)) node.children.set(name, { name, path, bytes: 0, ops: new Map(), children: new Map() });
      node = node.children.get(name);
      add(node, op, bytes);
    }
  }
  return root;
}

function add(node, op, bytes) {
  node.bytes += bytes;
  node.ops.set(op, (node.ops.get(op) ?? 0) + bytes);
}

/** Return the node at a path, or null where this state keeps nothing there. */
function nodeAt(root, path) {
  let node = root;
  for (const name of path.split("/").slice(1)) node = node?.children.get(name);
  return node ?? null;
}

/** Return the path below which there is a choice: a node with one child alone is passed through. */
function opened(roots, path) {
  for (;;) {
    const names = new Set(roots.flatMap((root) => [...(nodeAt(root, path)?.children.keys() ?? [])]));
    const inner = [...names].filter((name) => roots.some((root) => nodeAt(root, `${path}/${name}`)?.children.size));
    if (names.size !== 1 || inner.length !== 1) return path;
    path = `${path}/${inner[0]}`;
  }
}

/** Return the path to begin at: past the parts that hold nearly all of the model, such as its list of blocks. */
function firstPath(root) {
  let node = root;
  for (;;) {
    const [largest] = childrenOf(node);
    if (!largest?.children.size || largest.bytes < 0.9 * node.bytes) return node.path;
    node = largest;
  }
}

/** Return the children of a node, the largest first. */
function childrenOf(node) {
  return node ? [...node.children.values()].sort((a, b) => b.bytes - a.bytes) : [];
}

/** Return the ops of a state with their bytes, the largest first. */
function opsOf(rows) {
  return [...treeOf(rows, "op").ops].sort((a, b) => b[1] - a[1]);
}

/** Return bytes with a unit: 1.5 GiB, 12.0 MiB, 512 B. */
function sizeText(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = bytes;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit ? size.toFixed(1) : size} ${units[unit]}`;
}

/** Return a part of a whole as a percentage; a dash where the whole is nothing. */
function shareText(part, whole) {
  return whole && part !== null ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}
