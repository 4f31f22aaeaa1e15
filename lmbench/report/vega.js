// Draws each specification of the page, one after the other, in the page's light or dark colours.

// Charts with more rows of data than this are drawn on a canvas, others as SVG.
const MAX_SVG_ROWS = 2000;
const coloured = text => {
  const style = getComputedStyle(document.documentElement);
  const value = name => name && style.getPropertyValue(name).trim();
  return text.replace(/var\((--[\w-]+)(?:, var\((--[\w-]+)\))?\)/g, (_, name, fallback) => value(name) || value(fallback));
};
// The specification and its number of rows of data.
const parse = text => {
  let rows = 0;
  const spec = JSON.parse(coloured(text), (key, value) => {
    if (key === "values" && Array.isArray(value)) rows += value.length;
    return value;
  });
  return [spec, rows];
};
// Buttons and keys that zoom and move the visible part of the time axis.
const controls = (box, view, {signal, start, end}) => {
  const show = (from, range) => {
    range = Math.min(Math.max(range, (end - start) * 1e-5), end - start);
    from = Math.min(Math.max(from, start), end - range);
    view.signal(signal, [from, from + range]).runAsync();
  };
  const move = (zoom, shift) => {
    const [from, to] = view.scale("x").domain(), range = (to - from) * zoom;
    show((from + to - range) / 2 + shift * (to - from), range);
  };
  const actions = {"+": () => move(.5, 0), "\u2212": () => move(2, 0), "\u2190": () => move(1, -.25), "\u2192": () => move(1, .25), "whole": () => show(start, end - start)};
  const bar = document.createElement("div");
  bar.className = "vega-controls";
  for (const [name, act] of Object.entries(actions)) {
    const button = bar.appendChild(document.createElement("button"));
    button.type = "button"; button.textContent = name; button.addEventListener("click", act);
  }
  bar.append("drag to move; Ctrl and wheel to zoom");
  box.prepend(bar);
  const keys = {"+": "+", "=": "+", "-": "\u2212", ArrowLeft: "\u2190", ArrowRight: "\u2192", 0: "whole"};
  box.tabIndex = 0;
  box.onkeydown = event => { if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); actions[keys[event.key]](); } };
};
const draw = async (box, text) => {
  const [spec, rows] = parse(text);
  const options = {mode: "vega-lite", actions: false, ast: true, renderer: rows > MAX_SVG_ROWS ? "canvas" : "svg"};
  const target = document.createElement("div");
  box.replaceChildren(target);
  const {view} = await vegaEmbed(target, spec, options);
  box.dataset.rows = rows;
  if (spec.usermeta && spec.usermeta.zoom) controls(box, view, spec.usermeta.zoom);
};
const texts = new Map([...document.querySelectorAll(".vega")].map(box => [box, box.querySelector("script").textContent]));
const drawAll = async () => { for (const [box, text] of texts) await draw(box, text); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
