// Tables that sort and filter, and tables of parts with bars.

// Columns: {label, text: row -> text, key: row -> what sorts it (none: it does not sort), kind: "text", "long"
// or "" for numbers, node: row -> an element in place of the text}.
class SortedTable {
  constructor(columns, rows, { page = 20, chosen = null } = {}) {
    Object.assign(this, { columns, rows, page, chosen, test: () => true, sorted: null, down: false });
    this.size = page;
    this.head = make("tr");
    this.body = make("tbody");
    this.said = make("span", { class: "soft", role: "status" });
    this.more = make("button", { onclick: () => { this.size += 5 * this.page; this.show(); } }, "show more");
    this.element = make("div", {},
      make("div", { class: "scroll" }, make("table", {}, make("thead", {}, this.head), this.body)),
      make("div", { class: "controls" }, this.said, this.more));
    this.show();
  }

  filter(test) { this.test = test; this.size = this.page; this.show(); }

  sort(column) {
    this.down = this.sorted === column ? !this.down : false;
    this.sorted = column;
    this.show();
  }

  order() {
    const found = this.rows.filter(this.test);
    if (this.sorted === null) return found;
    const { key } = this.sorted;
    const way = this.down ? -1 : 1;
    return found.map(row => [key(row), row]).sort(([a], [b]) => {
      if (a === b) return 0;
      if (a === null || b === null) return a === null ? 1 : -1; // what is not known comes last, either way
      return (a < b ? -1 : 1) * way;
    }).map(([, row]) => row);
  }

  show() {
    const ordered = this.order();
    this.head.replaceChildren(...this.columns.map(column => {
      const sort = this.sorted === column ? (this.down ? "descending" : "ascending") : "none";
      const sign = { ascending: " ▲", descending: " ▼", none: "" }[sort];
      const label = column.key
        ? make("button", { onclick: () => this.sort(column) }, column.label + sign) : column.label;
      return make("th", { class: column.kind ? "text" : "", scope: "col", "aria-sort": column.key ? sort : null }, label);
    }));
    this.body.replaceChildren(...ordered.slice(0, this.size).map(row => this.line(row)));
    this.said.textContent = `${Math.min(this.size, ordered.length)} of ${ordered.length} shown` +
      (ordered.length < this.rows.length ? `, of ${this.rows.length} in all` : "");
    this.more.hidden = ordered.length <= this.size;
    this.more.parentElement.hidden = this.rows.length <= this.page;
  }

  line(row) {
    const cells = this.columns.map(column => make("td", { class: column.kind ? `text ${column.kind}` : "" },
      column.node ? column.node(row) : column.text(row)));
    if (!this.chosen) return make("tr", {}, ...cells);
    const choose = () => this.chosen(row);
    return make("tr", {
      class: "choosable", tabindex: "0", "aria-selected": row === this.selected ? "true" : "false",
      onclick: choose, onkeydown: event => { if (event.key === "Enter") choose(); },
    }, ...cells);
  }

  select(row) { this.selected = row; this.show(); }
}

// Rows of [name, seconds, more texts], with a bar for the seconds.
function barTable(labels, rows, most) {
  const largest = Math.max(...rows.map(row => Math.abs(row[1])), 1e-30);
  const table = make("tbody");
  for (const [name, size, ...texts] of rows.slice(0, most)) {
    const bar = make("i");
    bar.style.width = `${100 * Math.max(size, 0) / largest}%`;
    table.append(make("tr", {}, make("td", { class: "text" }, name),
      ...texts.map(text => make("td", {}, text)), make("td", { class: "bar" }, bar)));
  }
  const head = make("tr", {}, ...labels.map((label, n) => make("th", { class: n ? "" : "text", scope: "col" }, label)),
    make("th"));
  const rest = rows.length > most ? soft(`... and ${rows.length - most} more, each less`) : null;
  return make("div", {}, make("div", { class: "scroll" }, make("table", { class: "bars" }, make("thead", {}, head), table)), rest);
}
