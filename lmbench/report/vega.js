// Draws each specification of the page, one after the other, in the page's colours, light or dark.
const ROWS_ON_CANVAS = 2000;
const coloured = text => {
  const style = getComputedStyle(document.documentElement);
  const value = name => name && style.getPropertyValue(name).trim();
  return text.replace(/var\((--[\w-]+)(?:, var\((--[\w-]+)\))?\)/g, (_, name, other) => value(name) || value(other));
};
// The specification, and how many rows of data it has.
const parse = text => {
  let rows = 0;
  const spec = JSON.parse(coloured(text), (key, value) => {
    if (key === "values" && Array.isArray(value)) rows += value.length;
    return value;
  });
  return [spec, rows];
};
const draw = async (box, text) => {
  const [spec, rows] = parse(text);
  const options = {mode: "vega-lite", actions: false, ast: true, renderer: rows > ROWS_ON_CANVAS ? "canvas" : "svg"};
  const target = document.createElement("div");
  box.replaceChildren(target);
  await vegaEmbed(target, spec, options);
  box.dataset.rows = rows;
};
const texts = new Map([...document.querySelectorAll(".vega")].map(box => [box, box.querySelector("script").textContent]));
const drawAll = async () => { for (const [box, text] of texts) await draw(box, text); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
