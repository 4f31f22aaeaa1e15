"use strict";
// Makes each static timeline one that can be zoomed and panned. Times are in tenths of a microsecond.
for (const box of document.querySelectorAll(".timeline")) {
  const data = JSON.parse(box.dataset.timeline), svg = box.querySelector("svg"), info = box.querySelector(".timeline-info");
  const [ROW, TOP, HEIGHT, AXIS] = [38, 15, 20, 22], LABELS = [...svg.querySelectorAll("text.row")].slice(0, 5).map(t => t.textContent);
  const K = data.kernels, most = Math.max(data.end, 1), least = Math.min(50, most);
  let from = 0, to = most, chosen = -1, asked = false, drawn = [];
  const escaped = text => text.replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
  const micro = time => (time / 10).toLocaleString("en", {maximumFractionDigits: 1}) + " us";
  const bar = (start, end, colour, label, busy, kernel) => ({start, end, colour, label, busy, kernel});
  const ofKernel = (k, colour, label, index) => bar(Math.max(k[0], 0), k[0] + Math.max(k[1], 1), colour, label, k[6] ? 1 : .4, index);
  const runs = (place, names, gap) => {
    const found = []; let last = null;
    for (const k of K) {
      const key = k[place] + "," + k[6], own = ofKernel(k, names[k[place]][1], names[k[place]][0], -1), piece = found[found.length - 1];
      if (key === last && own.start - piece.end <= gap) piece.end = Math.max(piece.end, own.end); else found.push(own);
      last = key;
    }
    return found;
  };
  const rows = [
    data.host.filter(h => h[1] < most).map(h => bar(h[1], Math.min(h[2], most), data.colours[h[0]] || 0, h[0], 1, -1)),
    K.map((k, i) => bar(k[7], k[7] + Math.max(k[8], 1), data.kinds[k[3]][1], data.names[k[2]], 1, i)).filter(b => b.start >= 0).sort((a, b) => a.start - b.start),
    runs(5, data.phases, most), runs(4, data.parts, data.gap),
    K.map((k, i) => ofKernel(k, data.kinds[k[3]][1], data.names[k[2]], i)),
  ];
  // What is narrower than a pixel is joined with its neighbours; the longest of them gives colour and label.
  const merge = (bars, pixel) => {
    const found = []; let group = [], end = 0;
    const close = () => {
      if (group.length < 2) { found.push(...group); return; }
      const sums = new Map(); let filled = 0;
      for (const b of group) { sums.set(b.label, (sums.get(b.label) || 0) + b.end - b.start); filled += (b.end - b.start) * b.busy; }
      const label = [...sums].reduce((a, b) => b[1] > a[1] ? b : a)[0], colour = group.find(b => b.label === label).colour;
      const more = sums.size > 1 ? ` and ${group.length - 1} more` : ` (${group.length})`;
      found.push(bar(group[0].start, end, colour, label + more, Math.min(1, filled / Math.max(end - group[0].start, 1)), -1));
    };
    for (const b of bars) {
      if (b.end < from || b.start > to) continue;
      if (group.length && (b.start - end > pixel || end - group[0].start > pixel || b.end - b.start > pixel)) { close(); group = []; end = 0; }
      group.push(b); end = Math.max(end, b.end);
    }
    close();
    return found;
  };
  const draw = () => {
    asked = false;
    const width = Math.max(svg.clientWidth, 1), range = to - from, x = time => (time - from) / range * width;
    const out = []; drawn = [];
    rows.forEach((bars, row) => {
      const top = row * ROW;
      out.push(`<text class="row" x="0" y="${top + 11}">${escaped(LABELS[row])}</text>`);
      for (const b of merge(bars, range / width)) {
        const left = Math.max(x(b.start), 0), right = Math.min(x(b.end), width), wide = Math.max(right - left, .5);
        const fill = b.colour ? `var(--series-${b.colour})` : "var(--muted)", pale = b.busy > .99 ? "" : ` opacity="${Math.max(b.busy, .15).toFixed(2)}"`;
        const mark = b.kernel >= 0 && b.kernel === chosen ? ' class="chosen"' : "";
        out.push(`<rect data-bar="${drawn.length}"${mark} x="${left.toFixed(2)}" y="${top + TOP}" width="${wide.toFixed(2)}" height="${HEIGHT}" fill="${fill}"${pale}/>`);
        drawn.push([b, row]);
        if (wide > 36) out.push(`<svg x="${left.toFixed(2)}" y="${top + TOP}" width="${wide.toFixed(2)}" height="${HEIGHT}"><text class="on" x="5" y="${HEIGHT - 6}">${escaped(b.label)}</text></svg>`);
      }
    });
    if (chosen >= 0 && K[chosen][7] >= 0) {
      const k = K[chosen];
      out.push(`<line class="link" x1="${x(k[7]).toFixed(2)}" y1="${ROW + TOP + HEIGHT}" x2="${x(Math.max(k[0], 0)).toFixed(2)}" y2="${4 * ROW + TOP}"/>`);
    }
    const unit = range < 1e4 ? ["us", 10, 1] : ["ms", 1e4, 2];
    for (let i = 0; i < 5; i++) {
      const anchor = i === 0 ? "start" : i === 4 ? "end" : "middle", digits = unit[2] + (range / unit[1] < 1 ? 2 : 0);
      out.push(`<text class="row" x="${width * i / 4}" y="${5 * ROW + 13}" text-anchor="${anchor}">${((from + range * i / 4) / unit[1]).toFixed(digits)}${i === 4 ? " " + unit[0] : ""}</text>`);
    }
    svg.innerHTML = out.join("");
  };
  const refresh = () => { if (!asked) { asked = true; requestAnimationFrame(draw); } };
  const show = (start, range) => {
    range = Math.min(Math.max(range, least), most);
    from = Math.min(Math.max(start, 0), most - range); to = from + range;
    refresh();
  };
  const zoom = (factor, share = .5) => { const range = (to - from) * factor; show(from + (to - from) * share - Math.min(Math.max(range, least), most) * share, range); };
  const pan = share => show(from + (to - from) * share, to - from);
  const tell = target => {
    const found = target.closest && target.closest("[data-bar]");
    if (!found) return;
    const [b, row] = drawn[+found.dataset.bar] || [];
    if (!b) return;
    if (b.kernel < 0) { info.textContent = `${b.label}: ${micro(b.end - b.start)} from ${micro(b.start)}`; return; }
    const k = K[b.kernel], several = k[9] > 1 ? ` and ${k[9] - 1} more like it` : "";
    const launched = k[7] < 0 ? "launched in the step before" : `launched at ${micro(k[7])}, ${micro(k[0] - k[7])} before its start`;
    info.textContent = `${data.names[k[2]]}${several}: ${micro(k[1])} from ${micro(k[0])}; ${data.kinds[k[3]][0]}, ${data.parts[k[4]][0]}, ${data.phases[k[5]][0]}; ${launched}`;
    if (chosen !== b.kernel) { chosen = b.kernel; refresh(); }
  };
  const actions = {in: () => zoom(.5), out: () => zoom(2), left: () => pan(-.25), right: () => pan(.25), all: () => show(0, most)};
  box.querySelector(".timeline-controls").hidden = false;
  box.querySelector(".timeline-controls").addEventListener("click", event => { const name = event.target.dataset && event.target.dataset.action; if (name) actions[name](); });
  const keys = {"+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all"};
  svg.tabIndex = 0;
  svg.addEventListener("keydown", event => { if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); actions[keys[event.key]](); } });
  const shareAt = x => { const box = svg.getBoundingClientRect(); return Math.min(Math.max((x - box.left) / Math.max(box.width, 1), 0), 1); };
  svg.addEventListener("wheel", event => {
    // The plain wheel goes on scrolling the page.
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(event.deltaY * .01), shareAt(event.clientX)); }
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) { event.preventDefault(); pan((event.deltaX || event.deltaY) / svg.clientWidth); }
  }, {passive: false});
  svg.addEventListener("dblclick", event => zoom(.4, shareAt(event.clientX)));
  const held = new Map();
  svg.addEventListener("pointerdown", event => { held.set(event.pointerId, event.clientX); tell(event.target); });
  svg.addEventListener("pointermove", event => {
    const before = held.get(event.pointerId);
    if (before === undefined) { tell(event.target); return; }
    if (!svg.hasPointerCapture(event.pointerId) && Math.abs(event.clientX - before) > 2) svg.setPointerCapture(event.pointerId);
    const others = [...held].filter(entry => entry[0] !== event.pointerId);
    if (others.length) {
      const other = others[0][1], was = Math.abs(before - other), now = Math.abs(event.clientX - other);
      if (was > 4 && now > 4) zoom(was / now, shareAt((event.clientX + other) / 2));
    } else pan((before - event.clientX) / Math.max(svg.clientWidth, 1));
    held.set(event.pointerId, event.clientX);
  });
  for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) svg.addEventListener(name, event => held.delete(event.pointerId));
  new ResizeObserver(refresh).observe(svg);
  refresh();
}
