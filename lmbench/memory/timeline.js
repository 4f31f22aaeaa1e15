"use strict";
// Lets each static picture of memory tell what a block is. Heights of blocks are those of their category's stack.
for (const box of document.querySelectorAll(".memory-timeline")) {
  const data = JSON.parse(box.dataset.memory), svg = box.querySelector("svg.memory-picture"), areas = svg.querySelector("svg.areas");
  const info = box.querySelector(".memory-info"), columns = data.time.length;
  const mark = document.createElementNS(areas.namespaceURI, "path");
  mark.setAttribute("class", "chosen"); areas.appendChild(mark);
  box.querySelector(".memory-how").hidden = false;
  const size = bytes => bytes >= 2 ** 30 / 10 ? (bytes / 2 ** 30).toFixed(2) + " GiB" : (bytes / 2 ** 20).toFixed(bytes < 2 ** 20 ? 3 : 1) + " MiB";
  const y = bytes => data.units * (1 - bytes / data.most);
  let column = 0, height = 0;
  // Blocks that are held in a column, by category, from the bottom.
  const held = (at, category) => data.blocks.filter(b => b[3] === category && b[0] <= at && b[1] >= at);
  const floor = (at, category) => data.sizes.slice(0, category).reduce((sum, sizes) => sum + sizes[at], 0);
  const outline = block => {
    const up = [], down = [];
    for (let at = block[0]; at <= block[1]; at++) {
      let bottom = floor(at, block[3]);
      for (const other of held(at, block[3])) { if (other === block) break; bottom += other[2]; }
      up.push(`${at} ${y(bottom + block[2])}L${at + 1} ${y(bottom + block[2])}`);
      down.unshift(`${at + 1} ${y(bottom)}L${at} ${y(bottom)}`);
    }
    return `M${up.join("L")}L${down.join("L")}Z`;
  };
  const moment = at => {
    const band = data.bands.find(b => b[1] <= at && at < b[2]), total = data.sizes.reduce((sum, sizes) => sum + sizes[at], 0);
    const own = data.sizes.map((sizes, i) => [data.labels[i], sizes[at]]).filter(pair => pair[1]).sort((a, b) => b[1] - a[1]);
    return `${(data.time[at] / 1e3).toFixed(2)} ms${band ? ", " + band[0] : ""}: ${size(total)} of ${size(data.reserved[at])} reserved: ` + own.map(pair => `${pair[0]} ${size(pair[1])}`).join(", ");
  };
  const tell = () => {
    let bottom = 0, found = null, category = 0;
    for (; category < data.sizes.length; category++) {
      if (height < bottom + data.sizes[category][column]) break;
      bottom += data.sizes[category][column];
    }
    if (category === data.sizes.length) { mark.removeAttribute("d"); info.textContent = moment(column); return; }
    for (const block of held(column, category)) { if (height < bottom + block[2]) { found = block; break; } bottom += block[2]; }
    if (!found) { mark.removeAttribute("d"); info.textContent = `${data.labels[category]}: many blocks too small to tell apart\n${moment(column)}`; return; }
    const names = [data.labels[category], data.names[found[4]], data.names[found[5]] ? "made in " + data.names[found[5]] : "made before", data.names[found[6]] ? "saved by " + data.names[found[6]] : ""];
    const frames = data.stacks[found[7]];
    mark.setAttribute("d", outline(found));
    info.textContent = `${size(found[2])}: ${names.filter(name => name).join(", ")}\n${frames.length ? frames.join("\n") : "no stack: made before the history, or by autograd's own thread"}\n${moment(column)}`;
  };
  const point = event => {
    const place = areas.getBoundingClientRect().width ? svg.getBoundingClientRect() : null;
    if (!place) return;
    column = Math.min(Math.max(Math.floor((event.clientX - place.left) / place.width * columns), 0), columns - 1);
    height = (1 - (event.clientY - place.top - data.top) / data.height) * data.most;
    if (height >= 0) tell();
  };
  // Until somebody points: the peak. Arrow keys start there.
  column = data.peak; info.textContent = "At the peak, " + moment(column);
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.tabIndex = 0;
  const total = at => data.sizes.reduce((sum, sizes) => sum + sizes[at], 0);
  const moves = {ArrowLeft: () => column--, ArrowRight: () => column++, ArrowUp: () => height += total(column) / 40, ArrowDown: () => height -= total(column) / 40};
  svg.addEventListener("keydown", event => {
    if (!moves[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault(); moves[event.key]();
    column = Math.min(Math.max(column, 0), columns - 1); height = Math.min(Math.max(height, 0), data.most);
    tell();
  });
}
