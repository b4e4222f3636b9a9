// What the theme leaves out: a name of the search, and tables that scroll by keyboard.
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((table) => (table.tabIndex = 0));
});

// The picture on the first page: which keys each query sees, for a config that sliders set.
// Scores are made up: a block is as important to all queries, and a bit more or less to each.
const place = document.getElementById("nsa-masks");

function noise(a, b) {
  let x = Math.imul(a + 1, 0x9e3779b1) ^ Math.imul(b + 1, 0x85ebca6b);
  x = Math.imul(x ^ (x >>> 15), 0x2c1b3c6d);
  x = Math.imul(x ^ (x >>> 12), 0x297a2d39);
  return ((x ^ (x >>> 15)) >>> 0) / 2 ** 32;
}

// Blocks that queries of block `own` select: the first, the last two, and the highest scores.
function selected(own, count) {
  const forced = new Set([0, own - 1, own].filter((block) => block >= 0));
  const free = [...Array(own + 1).keys()].filter((block) => !forced.has(block))
    .map((block) => [noise(block, 7777) + 0.6 * noise(block, own), block])
    .sort((a, b) => b[0] - a[0]);
  return new Set([...forced, ...free.slice(0, count - forced.size).map((pair) => pair[1])]);
}

const BRANCHES = {
  compressed: (c) => (query, key) => {
    const block = Math.floor(key / c.stride);
    // Stripes stay as wide as can be seen: of one block, or of several.
    const stripe = Math.max(1, 2 ** Math.ceil(Math.log2(c.tokens / (48 * c.stride))));
    const shade = Math.floor(block / stripe) % 2 ? 1 : 0.4;
    return block * c.stride + c.length - 1 <= query ? shade : 0;
  },
  selected: (c) => {
    const rows = new Map();
    const row = (own) => rows.get(own) ?? rows.set(own, selected(own, c.count)).get(own);
    return (query, key) =>
      +(key <= query && row(Math.floor(query / c.block)).has(Math.floor(key / c.block)));
  },
  sliding: (c) => (query, key) => +(key <= query && key > query - c.window),
};

// What the last query reads of each branch.
const reads = (c) => ({
  compressed: Math.max(0, Math.floor((c.tokens - c.length) / c.stride) + 1),
  selected: Math.min(c.tokens, c.count * c.block),
  sliding: Math.min(c.tokens, c.window),
});

const SLIDERS = {
  tokens: ["tokens", 9, 16, 13, (x) => 2 ** x],
  count: ["selected blocks", 3, 32, 16, (x) => x],
  block: ["tokens a block", 4, 7, 6, (x) => 2 ** x],
  window: ["window", 5, 11, 9, (x) => 2 ** x],
};

function start() {
  place.innerHTML = `<div class="nsa-panels"></div><form class="nsa-sliders"></form>
    <p class="nsa-told" aria-live="polite"></p>`;
  const panels = Object.keys(BRANCHES).map((name) => {
    const figure = document.createElement("figure");
    figure.innerHTML = `<canvas width="256" height="256" role="img"></canvas>
      <figcaption><b>${name}</b><br><span></span></figcaption>`;
    place.firstChild.append(figure);
    return [name, figure];
  });
  const form = place.querySelector("form");
  for (const [name, [label, low, high, at]] of Object.entries(SLIDERS))
    form.insertAdjacentHTML("beforeend", `<label><span>${label} <b></b></span>
      <input type="range" name="${name}" min="${low}" max="${high}" value="${at}"></label>`);
  const draw = () => {
    const c = {stride: 16, length: 32};
    for (const [name, [, , , , value]] of Object.entries(SLIDERS)) {
      const input = form.elements[name];
      c[name] = value(+input.value);
      input.parentNode.querySelector("b").textContent = c[name].toLocaleString("en");
      input.setAttribute("aria-valuetext", c[name]);
    }
    const read = reads(c);
    for (const [name, figure] of panels) {
      paint(figure.querySelector("canvas"), BRANCHES[name](c), c.tokens, name);
      const kind = name === "compressed" ? "means of 32 keys" : "keys";
      figure.querySelector("span").textContent = `${read[name].toLocaleString("en")} ${kind}`;
    }
    const sum = read.compressed + read.selected + read.sliding;
    place.querySelector(".nsa-told").textContent =
      `The last query reads ${sum.toLocaleString("en")} keys and values; dense attention reads ` +
      `${c.tokens.toLocaleString("en")}` + (sum < c.tokens ? `, ${(c.tokens / sum).toFixed(1)} times as many.` : ".");
  };
  form.addEventListener("input", draw);
  // The theme's switch changes an attribute of the body.
  new MutationObserver(draw).observe(document.body, {attributes: true});
  draw();
}

function paint(canvas, sees, tokens, name) {
  const context = canvas.getContext("2d"), size = canvas.width, cell = tokens / size;
  const style = getComputedStyle(place);
  const [ink, shade] = ["--nsa-ink", "--nsa-shade"].map((each) =>
    style.getPropertyValue(each).match(/\d+/g).map(Number));
  const image = context.createImageData(size, size);
  for (let row = 0; row < size; row++)
    for (let column = 0; column < size; column++) {
      const query = Math.floor((row + 0.5) * cell), key = Math.floor((column + 0.5) * cell);
      const seen = sees(query, key), color = seen ? ink : shade;
      const alpha = seen ? 255 * (0.35 + 0.65 * seen) : key <= query ? 255 : 0;
      image.data.set([...color, alpha], 4 * (row * size + column));
    }
  context.putImageData(image, 0, 0);
  canvas.setAttribute("aria-label",
    `Keys that each query sees in the ${name} branch: queries run downwards, keys to the right.`);
}

if (place) start();
