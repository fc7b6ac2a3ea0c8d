// The plans of a search: the table, the picture of time against memory, and why the best is best.

function plansSection(plans) {
  const rows = plans.rows.map(cells => Object.fromEntries(plans.columns.map((name, n) => [name, cells[n]])));
  const info = make("output", {}, "Tap a plan, in the table or in the picture.");
  const table = new SortedTable(
    plans.shown.map(([label, form, ...names]) => ({ label, ...FORMS[form](...names) })),
    rows, { page: 10, chosen: choose });
  const picture = rows.some(row => row.step !== null) ? paretoPicture(plans, rows, choose) : null;

  function choose(row) {
    if (table.selected === row) return;
    table.select(row);
    if (picture) picture.select(row);
    const figures = row.step === null ? "" : `: ${seconds(row.step)} a step, ${bytes(row.memory)}`;
    const missing = row.missing ? `, ${bytes(row.missing)} too much` : "";
    info.replaceChildren(make("b", {}, row.plan), `${figures}${missing} - ${row.status}${row.note ? `; ${row.note}` : ""}`);
  }

  const place = plans.differences.length ? differences(plans) : null;
  const words = make("input", { type: "search", placeholder: "tp=2 zero=1", size: "16", oninput: filter });
  const statuses = [...new Set(rows.map(row => row.status))];
  const status = choice("status", [["", "all"], ...statuses.map(each => [each, each])], filter);
  function filter() {
    const asked = words.value.trim().split(/[\s,]+/).filter(Boolean);
    const wanted = status.querySelector("select").value;
    table.filter(row => (!wanted || row.status === wanted) && asked.every(word => holds(row.plan, word)));
  }
  const said = Object.entries(plans.counts).filter(([, n]) => n).map(([name, n]) => `${n} ${name}`).join(", ");
  return section("plans", "Plans",
    soft(`${plans.plans} plans: ${said}. Ranked by ${plans.objective}; degrees of one are not written.`),
    plans.left_out ? leftOut([`${plans.left_out} plans, none of which fits`]) : null,
    picture ? picture.element : null, info,
    make("div", { class: "controls" }, make("label", {}, "filter", words), status), table.element,
    place);
}

const known = (name, format) => row => (row[name] === null ? "" : format(row[name]));
const numeric = format => name => ({ text: known(name, format), key: row => row[name] });

// Forms of cells: what the table of columns (plan_search/columns.py) calls them -> a column of its values.
const FORMS = {
  seconds: numeric(value => seconds(value)),
  bytes: numeric(value => bytes(value)),
  share: numeric(value => share(value)),
  figure: numeric(value => figure(value)),
  interval: (low, high) => ({
    text: row => (row[low] === null ? "" : `${figure3(row[low])} to ${figure3(row[high])} s`) }),
  plan: name => ({ kind: "long", node: row => broken(row[name]), key: row => row[name] }),
  word: name => ({ kind: "text", text: row => row[name], key: row => row[name] }),
  words: name => ({ kind: "long", text: row => row[name] || "" }),
};

const figure3 = number => String(Number(number.toPrecision(3)));

// A plan whose lines break after commas.
const broken = plan =>
  make("span", {}, ...plan.split(",").flatMap((part, n, all) => [n + 1 < all.length ? `${part},` : part, make("wbr")]));

// field=value is a field as it stands; other words are looked for anywhere.
function holds(plan, word) {
  return /^\w+=\w/.test(word) ? plan.split(",").includes(word) : plan.includes(word);
}

function differences(plans) {
  const place = make("div");
  const show = number => {
    const { seconds: gap, parts } = plans.differences[Number(number)];
    const rows = parts.map(([name, first, second]) => [
      name, Math.abs(second - first), first ? seconds(first) : "-", second ? seconds(second) : "-", signed(second - first)]);
    place.replaceChildren(
      soft(`It takes ${signed(gap)} beside the best; on the mean device:`),
      rows.length ? barTable(["part", "best", "other", "difference"], rows, 10) : soft("Nothing differs."));
  };
  show(0);
  const options = plans.differences.map((each, n) => [String(n), each.plan]);
  return make("div", {}, make("h3", {}, "Why the best is best"),
    make("div", { class: "controls" }, choice("against", options, show)), place);
}

// Time against memory, a point for each plan that was simulated.
function paretoPicture(plans, rows, chosen) {
  const [width, height] = window.innerWidth < 700 ? [420, 330] : [860, 360];
  const room = { left: 56, right: 14, top: 26, bottom: 40 };
  const points = rows.filter(row => row.step !== null);
  const most = Math.max(...points.map(row => row.memory));
  const limited = plans.usable !== null && plans.usable < 8 * most;
  const span = (values, part) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return [Math.max(low - part * (high - low), low / 2), high + (part * (high - low) || high / 2)];
  };
  const [left, right] = span([...points.map(row => row.memory), ...(limited ? [plans.usable] : [])], 0.05);
  const [low, high] = span(points.map(row => row.step), 0.06);
  const x = value => room.left + ((value - left) / (right - left)) * (width - room.left - room.right);
  // Times lie on a logarithmic axis, as the best are close to each other and the worst far from them.
  const y = value =>
    height - room.bottom - (Math.log(value / low) / Math.log(high / low)) * (height - room.top - room.bottom);
  const picture = draw("svg", { class: "picture", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "step time against peak memory of the plans" });
  const line = attributes => draw("line", { stroke: "var(--line)", ...attributes });
  const unit = most >= 2 ** 30 ? 2 ** 30 : most >= 2 ** 20 ? 2 ** 20 : 2 ** 10;
  for (const each of ticks(left / unit, right / unit, width / 110)) {
    picture.append(line({ x1: x(each * unit), x2: x(each * unit), y1: room.top, y2: height - room.bottom }),
      draw("text", { x: x(each * unit), y: height - room.bottom + 16, "text-anchor": "middle" }, bytes(each * unit)));
  }
  let last = Infinity;
  for (const each of ticks(low, high, 24)) {
    if (last - y(each) < 26) continue;
    last = y(each);
    picture.append(line({ x1: room.left, x2: width - room.right, y1: last, y2: last }),
      draw("text", { x: room.left - 6, y: last + 4, "text-anchor": "end" }, seconds(each)));
  }
  picture.append(draw("text", { x: width - room.right, y: height - 6, "text-anchor": "end" }, "memory of the fullest device"),
    draw("text", { x: room.left, y: 13 }, "seconds a step (logarithmic)"));
  if (limited) {
    picture.append(line({ x1: x(plans.usable), x2: x(plans.usable), y1: room.top, y2: height - room.bottom,
      stroke: "var(--bad)", "stroke-dasharray": "5 4" }),
    draw("text", { x: x(plans.usable) - 5, y: x(plans.usable) > 0.6 * width ? 13 : room.top + 12, "text-anchor": "end" }, `usable: ${bytes(plans.usable)}`));
  }
  const front = plans.pareto.map(plan => points.find(row => row.plan === plan)).filter(Boolean);
  const steps = front.map((row, n) => 
    (n ? `V${y(row.step).toFixed(1)}H${x(row.memory).toFixed(1)}` : `M${x(row.memory).toFixed(1)} ${y(row.step).toFixed(1)}`));
  picture.append(draw("path", { d: steps.join(""), fill: "none", stroke: "var(--accent)", "stroke-width": "1.5" }));
  const dots = new Map();
  for (const row of [...points].reverse()) {
    const fits = row.status === "fits";
    const best = front.includes(row);
    const dot = draw("circle", { cx: x(row.memory), cy: y(row.step), r: best ? 5 : 3.2,
      fill: fits ? (best ? "var(--accent)" : "var(--soft)") : "none", stroke: fits ? "var(--back)" : "var(--bad)" },
    draw("title", {}, `${row.plan}: ${seconds(row.step)}, ${bytes(row.memory)}`));
    dots.set(row, dot);
    picture.append(dot);
  }
  const ring = draw("circle", { r: 9, fill: "none", stroke: "var(--path)", "stroke-width": "2.5", visibility: "hidden" });
  picture.append(ring);
  // The nearest point answers, so that a finger need not hit it.
  const answer = event => {
    const frame = picture.getBoundingClientRect();
    const at = [(event.clientX - frame.left) * width / frame.width, (event.clientY - frame.top) * height / frame.height];
    const far = row => Math.hypot(x(row.memory) - at[0], y(row.step) - at[1]);
    const nearest = points.reduce((a, b) => (far(b) < far(a) ? b : a));
    if (far(nearest) < 30) chosen(nearest);
  };
  picture.addEventListener("pointermove", event => { if (event.pointerType === "mouse") answer(event); });
  picture.addEventListener("click", answer);
  const legend = make("div", { class: "legend" });
  for (const [colour, text] of [["--accent", "none is faster with as little memory"], ["--soft", "fits"], ["--bad", "nearly fits"]]) {
    const swatch = make("i");
    swatch.style.background = `var(${colour})`;
    if (colour !== "--bad" || points.some(row => row.status !== "fits")) legend.append(make("span", {}, swatch, text));
  }
  return {
    element: make("div", {}, picture, legend),
    select(row) {
      const dot = dots.get(row);
      ring.setAttribute("visibility", dot ? "visible" : "hidden");
      if (dot) for (const name of ["cx", "cy"]) ring.setAttribute(name, dot.getAttribute(name));
    },
  };
}
