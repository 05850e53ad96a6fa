"use strict";
// Sorts and filters tables, and links what is about the same sample. Without it everything is on the page, in the order it was written.
(() => {
  const all = (query, from = document) => [...from.querySelectorAll(query)];
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

  // The words for all that is marked with one sample, and what is picked.
  const about = new Map();
  for (const element of all("[data-s]")) {
    const sample = element.dataset.s;
    about.set(sample, [...(about.get(sample) || []), element]);
  }
  const light = (sample, name, on) => (about.get(sample) || []).forEach((element) => element.classList.toggle(name, on));
  let picked = null;

  const prepared = new Map();
  for (const table of all("table.data")) {
    const heads = all("thead th", table);
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => {
      const cells = [...row.cells].map((cell) => cell.textContent.trim());
      return { row, cells, text: cells.join(" ").toLowerCase() };
    });
    const columns = new Map(heads.map((head, place) => [head.dataset.key.toLowerCase(), place]));
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
    const state = { table, rows, columns, only: null, words: "" };
    prepared.set(table.id, state);
    if (rows.length >= 8) addFilter(state);
  }

  // Words that must all be in a row; loss>2, label=cat and the like look at one column.
  function passes(state, each, word) {
    const parts = /^([^<>=]+)(<=|>=|!=|=|<|>)(.*)$/.exec(word);
    const place = parts && state.columns.get(parts[1].replace(/!$/, ""));
    if (place === undefined || place === null) return each.text.includes(word);
    const how = parts[1].endsWith("!") ? "!=" : parts[2];
    const cell = each.cells[place].toLowerCase();
    const [a, b] = [numberOf(cell), numberOf(parts[3])];
    if (how === "=" || how === "!=") return (how === "=") === (cell === parts[3] || (!Number.isNaN(b) && a === b) || (parts[3] === "" && missing(cell)));
    return how === "<" ? a < b : how === ">" ? a > b : how === "<=" ? a <= b : a >= b;
  }

  function filter(state) {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const each of state.rows) {
      const kept = (!state.only || each.cells[state.only.place] === state.only.value) && words.every((word) => passes(state, each, word));
      each.row.hidden = !kept;
      shown += kept;
      if (state.table.id === "samples") light(each.row.dataset.s, "dim", !kept);
    }
    state.count.textContent = `${shown} of ${state.rows.length} shown`;
    state.chip.hidden = !state.only;
    state.chip.textContent = state.only ? `${state.only.key} is ${state.only.value} ×` : "";
  }

  function addFilter(state) {
    const input = make("input", { type: "search", id: `find-${state.table.id}`, placeholder: "words, or loss>2" });
    if (!state.columns.has("loss")) input.placeholder = "words";
    const label = make("label", { htmlFor: input.id, textContent: "Filter" });
    state.chip = make("button", { type: "button", className: "chip", hidden: true });
    state.count = make("output", { textContent: `${state.rows.length} rows` });
    input.addEventListener("input", () => { state.words = input.value; filter(state); });
    state.chip.addEventListener("click", () => { state.only = null; filter(state); });
    state.table.closest(".scroll").before(make("div", { className: "tools" }, label, input, state.chip, state.count));
  }

  // A class's name becomes a button that leaves only its samples in the table of samples, and dims the others in the plot.
  const samples = prepared.get("samples");
  if (samples && samples.count) {
    for (const row of all("tr[data-key]")) {
      const cell = row.cells[0];
      const place = samples.columns.get(row.dataset.key);
      if (place === undefined) continue;
      const value = cell.textContent.trim();
      const button = make("button", { type: "button", className: "link", title: "Show its samples in the table above" }, ...cell.childNodes);
      cell.append(button);
      button.addEventListener("click", () => {
        samples.only = { key: row.dataset.key, place, value };
        filter(samples);
        document.getElementById("find-samples").closest("section").scrollIntoView({ block: "start" });
      });
    }
  }

  const words = make("p", { className: "picked", role: "status", textContent: "Point at a sample to find it everywhere; click to keep it." });
  const plot = document.querySelector("svg.scatter");
  if (plot) plot.closest(".scroll").after(words);

  function describe(sample) {
    const each = samples && samples.rows.find((one) => one.row.dataset.s === sample);
    if (!each) return;
    const heads = all("thead th", samples.table);
    const said = ["id", "label", "prediction", "loss", "grad_norm", "reasons"].flatMap((key) => {
      const place = samples.columns.get(key);
      return place === undefined || missing(each.cells[place]) ? [] : [key === "id" || key === "reasons" ? each.cells[place] : `${heads[place].textContent} ${each.cells[place]}`];
    });
    words.textContent = said.join(" · ");
  }
  function pick(sample, from) {
    if (picked) light(picked, "kept", false);
    picked = picked === sample ? null : sample;
    if (!picked) return;
    light(picked, "kept", true);
    describe(picked);
    const row = samples && samples.rows.find((one) => one.row.dataset.s === picked);
    const box = row && row.row.closest(".scroll");
    if (box && !box.contains(from)) box.scrollTop = row.row.offsetTop - box.clientHeight / 2;
  }
  const sampleAt = (target) => target instanceof Element && target.closest("[data-s]");
  for (const [event, on] of [["pointerover", true], ["focusin", true], ["pointerout", false], ["focusout", false]]) {
    document.addEventListener(event, ({ target }) => {
      const element = sampleAt(target);
      if (!element) return;
      light(element.dataset.s, "lit", on);
      if (on) describe(element.dataset.s);
      else if (picked) describe(picked);
    });
  }
  document.addEventListener("click", ({ target }) => {
    const element = sampleAt(target);
    if (element && !target.closest("a, button, summary")) pick(element.dataset.s, element);
  });

  // One row of the table of samples is in the tab order; arrows go to its neighbours, Enter keeps.
  if (samples) {
    const first = samples.rows[0];
    if (first) first.row.tabIndex = 0;
    samples.table.addEventListener("keydown", (event) => {
      const row = event.target.closest("tr[data-s]");
      if (!row || event.target !== row) return;
      const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
      if (step) {
        let next = row[step];
        while (next && next.hidden) next = next[step];
        if (next) { row.tabIndex = -1; next.tabIndex = 0; next.focus(); }
      } else if (event.key === "Enter") pick(row.dataset.s, row);
      else return;
      event.preventDefault();
    });
  }
})();
