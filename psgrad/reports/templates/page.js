"use strict";
// Sorts and filters tables. Without it everything is on the page, in the order it was written.
(() => {
  const make = (tag, properties = {}, ...inside) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...inside);
    return made;
  };
  const collator = new Intl.Collator(undefined, { numeric: true });
  const numberOf = (text) => {
    const plain = text.replaceAll(",", "").trim();
    return /^[-+]?inf/.test(plain) ? (plain[0] === "-" ? -Infinity : Infinity) : parseFloat(plain);
  };
  const missing = (text) => text === "" || text === "–";

  document.querySelectorAll("table.data").forEach((table, number) => {
    const heads = [...table.querySelectorAll("thead th")];
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => {
      const cells = [...row.cells].map((cell) => cell.textContent.trim());
      return { row, cells, text: cells.join(" ").toLowerCase() };
    });
    const columns = new Map(heads.map((head, place) => [(head.dataset.key || head.textContent).trim().toLowerCase().replaceAll(" ", "_"), place]));
    heads.forEach((head, place) => {
      const button = make("button", { type: "button" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        const numeric = head.classList.contains("n");
        const down = now ? now === "ascending" : numeric;
        const key = numeric ? (each) => numberOf(each.cells[place]) : (each) => each.cells[place];
        const order = numeric ? (a, b) => (a < b ? -1 : a > b ? 1 : 0) : collator.compare;
        const gone = numeric ? Number.isNaN : missing;
        const keyed = rows.map((each) => [key(each), each]);
        keyed.sort(([a], [b]) => gone(a) - gone(b) || (gone(a) ? 0 : down ? order(b, a) : order(a, b)));
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...keyed.map(([, each]) => each.row));
      });
    });
    if (rows.length < 8) return;

    // Words that must all be in a row; loss>2, label=cat and the like look at one column.
    const passes = (each, word) => {
      const parts = /^([^<>=]+)(<=|>=|!=|=|<|>)(.*)$/.exec(word);
      const place = parts && columns.get(parts[1].replace(/!$/, ""));
      if (place === undefined || place === null) return each.text.includes(word);
      const how = parts[1].endsWith("!") ? "!=" : parts[2];
      const cell = each.cells[place].toLowerCase();
      const [a, b] = [numberOf(cell), numberOf(parts[3])];
      if (how === "=" || how === "!=") return (how === "=") === (cell === parts[3] || (!Number.isNaN(b) && a === b) || (parts[3] === "" && missing(cell)));
      return how === "<" ? a < b : how === ">" ? a > b : how === "<=" ? a <= b : a >= b;
    };
    const input = make("input", { type: "search", id: `find-${table.id || number}`, placeholder: columns.has("loss") ? "words, or loss>2" : "words" });
    const label = make("label", { htmlFor: input.id, textContent: "Filter" });
    const count = make("output", { textContent: `${rows.length} rows` });
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const each of rows) each.row.hidden = !words.every((word) => passes(each, word));
      count.textContent = `${rows.filter((each) => !each.row.hidden).length} of ${rows.length} shown`;
    });
    table.closest(".scroll").before(make("div", { className: "tools" }, label, input, count));
  });
})();
