"use strict";
// A click on a heading, or Enter on it, sorts by that column: up, down, and as it was.
for (const table of document.querySelectorAll(".scroll > table")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const total = rows.filter((row) => row.classList.contains("total"));
  const others = rows.filter((row) => !row.classList.contains("total"));
  if (others.length < 2) continue;
  const value = (cell, isNumber) => {
    const text = cell.textContent.trim();
    if (!isNumber) return text;
    // What ended otherwise than well has no figure.
    const found = /outcome|missing/.test(cell.className) ? null : text.replace(/,/g, "").match(/[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
    return found ? Number(found[0]) : NaN;
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const isNumber = head.classList.contains("number");
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "" }[head.getAttribute("aria-sort")] ?? "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (next) head.setAttribute("aria-sort", next);
      const sign = next === "descending" ? -1 : 1;
      const sorted = !next ? others : [...others].sort((a, b) => {
        const [x, y] = [value(a.cells[column], isNumber), value(b.cells[column], isNumber)];
        if (!isNumber) return sign * x.localeCompare(y, "en", { numeric: true });
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return sign * (x - y);
      });
      body.append(...sorted, ...total);
    });
  });
}
