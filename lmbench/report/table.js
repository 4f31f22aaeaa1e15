"use strict";
// A click on a heading, or Enter on it, sorts the rows by that column: ascending, then descending, then as they were.
for (const table of document.querySelectorAll(".scroll > table")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const total = rows.filter((row) => row.classList.contains("total"));
  const sortable = rows.filter((row) => !row.classList.contains("total"));
  if (sortable.length < 2) continue;
  const value = (cell, isNumber) => {
    const text = cell.textContent.trim();
    if (!isNumber) return text;
    // The cell of a run that did not end well has no number, whatever digits its text has.
    if (/outcome|missing/.test(cell.className)) return NaN;
    const number = text.replace(/,/g, "").match(/[-+]?\d+(\.\d+)?(e[-+]?\d+)?/i);
    return number ? Number(number[0]) : NaN;
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const isNumber = head.classList.contains("number");
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const order = { ascending: "descending", descending: "" }[head.getAttribute("aria-sort")] ?? "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (order) head.setAttribute("aria-sort", order);
      const sign = order === "descending" ? -1 : 1;
      const sorted = !order ? sortable : [...sortable].sort((a, b) => {
        const [x, y] = [value(a.cells[column], isNumber), value(b.cells[column], isNumber)];
        if (!isNumber) return sign * x.localeCompare(y, "en", { numeric: true });
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return sign * (x - y);
      });
      body.append(...sorted, ...total);
    });
  });
}
