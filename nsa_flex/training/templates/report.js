// Draws what is in #data: lines over the x that the form names, layers as heat maps over steps.
const {runs, captions, refresh} = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("controls");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const several = runs.length > 1;
// Hours of long runs, minutes of short ones.
const longest = Math.max(...runs.flatMap((run) => [run.lines.hours.at(-1), run.beats.hours?.at(-1) ?? 0]));
const [unit, inHour] = longest < 2 ? ["minutes", 60] : ["hours", 1];
for (const {lines, beats} of runs) {
  lines[unit] = lines.hours.map((hours) => hours * inHour);
  if (beats.hours) beats[unit] = beats.hours.map((hours) => hours * inHour);
}
const xOf = (form) => form.x.value === "time" ? unit : form.x.value;
let plots = [];

const short = (value) => {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e6))
    return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return value.toLocaleString("en", {maximumSignificantDigits: 4});
};
const words = (name) => name.replaceAll("_", " ").replace("percent", "%");

function figure(place, title, caption, log) {
  const node = document.createElement("figure");
  node.className = "card";
  node.innerHTML = `<figcaption><h3></h3><p class="muted"></p></figcaption>
    <div class="plot"></div><output class="read"></output>`;
  node.querySelector("h3").textContent = title;
  node.querySelector("p").textContent = caption ?? "";
  if (log !== undefined) {
    const label = document.createElement("label");
    label.className = "log";
    label.innerHTML = `<input type="checkbox" name="log"> log`;
    label.firstChild.checked = log;
    label.firstChild.onchange = () => node.draw();
    node.querySelector("figcaption").append(label);
  }
  document.getElementById(place).append(node);
  node.isLog = () => node.querySelector("[name=log]")?.checked ?? false;
  return node;
}

const axis = (more) => ({
  stroke: () => color("--muted"),
  grid: {stroke: () => color("--line"), width: 1},
  ticks: {stroke: () => color("--line"), width: 1},
  font: "12px system-ui, sans-serif",
  ...more,
});

function show(node, options, data, text) {
  node.plot?.destroy();
  plots = plots.filter((plot) => plot !== node.plot);
  const place = node.querySelector(".plot");
  const plot = new uPlot({width: place.clientWidth, ...options}, data, place);
  const canvas = plot.ctx.canvas;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${node.querySelector("h3").textContent}. ${text}`);
  node.querySelector(".read").textContent = text;
  node.plot = plot;
  plots.push(plot);
}

// One line a series: {label, points, color, dots, gaps}; gaps are pairs of x between which a line
// breaks, shaded where there is one run. Marks: x of vertical lines.
function lines(place, {title, caption, xName, series, marks, log, zero}) {
  const node = figure(place, title, caption, log);
  node.draw = () => {
    const x = xName ?? xOf(form), isLogX = !xName && form.logx.checked, isLogY = node.isLog();
    const tables = series().map(({points}) => {
      const kept = points.filter(([a, b]) =>
        a != null && b != null && (!isLogX || a > 0) && (!isLogY || b > 0));
      return [kept.map((p) => p[0]), kept.map((p) => p[1])];
    });
    const shown = series().filter((_, i) => tables[i][0].length);
    const full = tables.filter((table) => table[0].length);
    node.hidden = !full.length;
    if (node.hidden) return;
    const data = uPlot.join(full);
    const last = shown.map((one, i) => `${one.label} ${short(full[i][1].at(-1))}`).join(" · ");
    const nearest = (at) => shown.map((one, i) =>
      `${one.label} ${short(full[i][1][closest(full[i][0], data[0][at])])}`).join(" · ");
    show(node, {
      height: 240,
      scales: {
        x: {time: false, distr: isLogX ? 3 : 1},
        y: {distr: isLogY ? 3 : 1, ...(zero && !isLogY ? {range: (u, low, high) => [0, 1.05 * high]} : {})},
      },
      axes: [
        axis({label: x, labelFont: "12px system-ui, sans-serif", labelSize: 18, size: 34,
              values: (u, all) => all.map((value) => value == null ? "" : compact(value))}),
        axis({size: 52, values: (u, all) => all.map((value) => value == null ? "" : compact(value))}),
      ],
      legend: {show: shown.length > 1, live: false},
      cursor: {sync: xName ? undefined : {key: "x"}, y: false},
      series: [{}, ...shown.map((one) => ({
        label: one.label, stroke: () => color(one.color), width: one.dots ? 2.5 : 1.5,
        spanGaps: !one.gaps?.length,
        gaps: (u, at, from, to, none) => [...none, ...(one.gaps ?? []).map((ends) =>
          ends.map((x) => u.valToPos(x, "x", true)))],
        points: {show: one.dots || full[0][0].length < 40, size: one.dots ? 7 : 4},
      }))],
      hooks: {
        drawAxes: [(u) => background(u, marks?.(), several ? [] : shown[0].gaps)],
        setCursor: [(u) => {
          const at = u.cursor.idx;
          node.querySelector(".read").textContent =
            at == null ? last : `${x} ${short(data[0][at])}: ${nearest(at)}`;
        }],
      },
    }, data, last);
  };
  node.draw();
  return node;
}

function closest(sorted, x) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= x) low = middle; else high = middle;
  }
  return x - sorted[low] <= sorted[high] - x ? low : high;
}

const compact = (value) => Math.abs(value) >= 1e4
  ? value.toLocaleString("en", {notation: "compact", maximumFractionDigits: 1}) : short(value);

function background(u, marks = [], gaps = []) {
  const {left, top, width, height} = u.bbox, {ctx} = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.fillStyle = color("--notebg");
  for (const [from, to] of gaps) {
    const begin = u.valToPos(from, "x", true), end = u.valToPos(to, "x", true);
    ctx.fillRect(begin, top, Math.max(2 * devicePixelRatio, end - begin), height);
  }
  ctx.strokeStyle = color("--note");
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const x of marks) {
    const at = u.valToPos(x, "x", true);
    ctx.beginPath();
    ctx.moveTo(at, top);
    ctx.lineTo(at, top + height);
    ctx.stroke();
  }
  ctx.restore();
}

// Dark to light, readable in both schemes; equal steps look equal.
const RAMP = ["#440154", "#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#fde725"]
  .map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
function ramp(share) {
  const place = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(place), RAMP.length - 2), part = place - low;
  return `rgb(${RAMP[low].map((a, i) => Math.round(a + part * (RAMP[low + 1][i] - a)))})`;
}

function heat(place, run, name, [low, high], caption) {
  const {steps, layers, values} = run.layers;
  const table = values[name], of = several ? ` · ${run.name}` : "";
  const node = figure(place, words(name) + of, caption);
  const scale = document.createElement("div");
  scale.className = "scale";
  scale.innerHTML = `<span>${short(low)}</span><i></i><span>${short(high)}</span>`;
  scale.children[1].style.background =
    `linear-gradient(90deg, ${RAMP.map((rgb) => `rgb(${rgb})`)})`;
  node.append(scale);
  const final = table.at(-1).filter((value) => value != null);
  const text = final.length
    ? `step ${steps.at(-1)}: ${short(Math.min(...final))} to ${short(Math.max(...final))}` : "";
  // A measurement stands for the steps up to the next one.
  const edges = [...steps, 2 * steps.at(-1) - (steps.at(-2) ?? steps.at(-1) - 1)];
  const paint = (u) => {
    const {ctx} = u;
    const ys = layers.map((_, i) => [i - 0.5, i + 0.5].map((y) => u.valToPos(y, "y", true)));
    steps.forEach((_, i) => {
      const left = Math.floor(u.valToPos(edges[i], "x", true));
      const right = Math.ceil(u.valToPos(edges[i + 1], "x", true));
      ys.forEach(([top, bottom], layer) => {
        const value = table[i][layer];
        if (value == null) return;
        ctx.fillStyle = ramp(high > low ? (value - low) / (high - low) : 0.5);
        ctx.fillRect(left, Math.floor(top), right - left, Math.ceil(bottom) - Math.floor(top));
      });
    });
  };
  const every = Math.ceil(layers.length / 8);
  node.draw = () => show(node, {
    height: 74 + Math.min(220, Math.max(44, 14 * layers.length)),
    scales: {
      x: {time: false, range: () => [edges[0], edges.at(-1)]},
      y: {range: () => [-0.5, layers.length - 0.5], dir: -1},
    },
    axes: [
      axis({label: "step", labelFont: "12px system-ui, sans-serif", labelSize: 18, size: 34,
            grid: {show: false}, values: (u, all) => all.map(compact)}),
      axis({size: 30, grid: {show: false},
            splits: () => layers.map((_, i) => i).filter((i) => i % every === 0),
            values: (u, all) => all.map(String)}),
    ],
    legend: {show: false},
    cursor: {drag: {x: false, y: false}, points: {show: false}},
    series: [{}, {paths: () => null, points: {show: false}}],
    hooks: {
      draw: [paint],
      setCursor: [(u) => {
        const {left, top} = u.cursor;
        const x = u.posToVal(left, "x"), layer = Math.round(u.posToVal(top, "y"));
        const at = steps.findLastIndex((step) => step <= x);
        node.querySelector(".read").textContent = left < 0 || at < 0 || !layers[layer] ? text
          : `step ${steps[at]}, ${layers[layer]}: ${short(table[at][layer])}`;
      }],
    },
  }, [steps, steps.map(() => 0)], text);
  node.draw();
}

const tint = (i) => `--g${i % 8}`;
const points = (columns, x, y) => columns[x].map((at, i) => [at, columns[y][i]]);

function training() {
  const marks = () => runs.flatMap(({lines: columns}) =>
    columns[xOf(form)].filter((x, i) => columns.begins[i] && x != null));
  const of = (run, label) => several ? (label ? `${run.name}, ${label}` : run.name) : label;
  const loss = () => runs.flatMap((run, i) => [
    {label: of(run, "loss"), points: points(run.lines, xOf(form), "loss"),
     color: tint(several ? i : 0)},
    {label: of(run, "held out"), points: points(run.lines, xOf(form), "held_out_loss"),
     color: tint(several ? i : 1), dots: true},
  ]);
  lines("lines", {title: "Loss", caption: "Nats a token.", series: loss, marks, log: false});
  const shown = new Set(["session", "step", "tokens", "hours", "minutes", "begins", "loss", "held_out_loss"]);
  for (const name of Object.keys(runs[0].lines).filter((each) => !shown.has(each))) {
    const series = () => runs.flatMap((run, i) => run.lines[name] ? [{
      label: of(run, words(name)), points: points(run.lines, xOf(form), name), color: tint(i),
    }] : []);
    lines("lines", {title: words(name), caption: captions[name], series, marks,
                    log: name === "grad_norm"});
  }
}

function machine() {
  const memory = ["host, peak", "device", "device, peak"];
  const series = (names) => () => runs.flatMap(({name: run, beats}, i) =>
    (beats.hours ? names : []).map((name, j) => ({
      label: several ? (names.length > 1 ? `${run}, ${name}` : run) : name,
      points: points(beats, unit, name), color: tint(several ? i : j),
      gaps: beats.gaps.map((ends) => ends.map((hours) => hours * inHour)),
    })));
  const told = several ? "Broken" : "Shaded";
  for (const [title, measured, names] of [
    ["speed", "Tokens a second", ["tokens a second"]], ["memory", "GiB", memory],
  ])
    lines("lines", {title, caption: `${measured}. ${told}: no heartbeat.`, zero: true,
                    xName: unit, series: series(names)});
}

function layered() {
  const measured = runs.filter((run) => run.layers.steps);
  const names = [...new Set(measured.flatMap((run) => Object.keys(run.layers.values)))];
  // Shares have one scale, so have gates: what is compared looks alike.
  const family = (name) => /^(share|gate)_/.exec(name)?.[1] ?? name;
  const constant = [];
  for (const name of names) {
    const alike = names.filter((other) => family(other) === family(name));
    const numbers = measured.flatMap((run) =>
      alike.flatMap((other) => (run.layers.values[other] ?? []).flat())).filter((x) => x != null);
    if (!numbers.length) continue;
    if (numbers.every((x) => x === numbers[0])) {
      constant.push(`${words(name)} ${short(numbers[0])}`);
      continue;
    }
    const range = [numbers.reduce((a, b) => Math.min(a, b)), numbers.reduce((a, b) => Math.max(a, b))];
    for (const run of measured)
      if (run.layers.values[name]) heat("heat", run, name, range, captions[name]);
  }
  if (constant.length)
    document.getElementById("constant").textContent = `Everywhere: ${constant.join(", ")}.`;
}

// What the form says outlasts a reload.
const state = new URLSearchParams(location.hash.slice(1));
if (state.has("x")) form.x.value = state.get("x");
form.logx.checked = state.has("logx");
if (!runs.every((run) => run.lines.tokens.some((x) => x)))
  form.querySelector("[value=tokens]").disabled = true;
const redraw = () => document.querySelectorAll("figure").forEach((node) => node.draw());
form.onchange = () => {
  history.replaceState(null, "", `#x=${form.x.value}${form.logx.checked ? "&logx" : ""}`);
  redraw();
};
training();
machine();
layered();
document.getElementById("layers").hidden = !runs.some((run) => run.layers.steps);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(() => plots.forEach((plot) => {
  const place = plot.root.parentNode;
  if (place.clientWidth && place.clientWidth !== plot.width)
    plot.setSize({width: place.clientWidth, height: plot.height});
})).observe(document.querySelector("main"));
if (refresh) setInterval(() => { if (form.reload.checked) location.reload(); }, 1000 * refresh);
