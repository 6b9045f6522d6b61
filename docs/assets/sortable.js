// A click on a heading of a table in <div class="sortable"> sorts by it: numbers as numbers, the rest as text.
document$.subscribe(() => {
  for (const table of document.querySelectorAll(".sortable table")) {
    const body = table.tBodies[0];
    table.querySelectorAll("th").forEach((heading, column) => {
      const value = (row) => row.cells[column].textContent.trim();
      const number = (row) => parseFloat(value(row).replace(/[, ]/g, ""));
      const sort = () => {
        const down = heading.ariaSort !== "descending" && column > 0;
        const sign = heading.ariaSort === "ascending" || down ? -1 : 1;
        const rows = [...body.rows];
        const numbers = rows.some((row) => !isNaN(number(row)));
        rows.sort((a, b) => {
          if (!numbers) return sign * value(a).localeCompare(value(b));
          const [x, y] = [number(a), number(b)];
          if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
          return sign * (x - y);
        });
        table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
        heading.ariaSort = sign < 0 ? "descending" : "ascending";
        body.append(...rows);
      };
      heading.tabIndex = 0;
      heading.addEventListener("click", sort);
      heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }
});
