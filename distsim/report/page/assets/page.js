// The page: a case at a time, its parts one below the other.

function aboutPart(item) {
  const pairs = Object.entries(item.about).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, broken(text))]);
  return make("dl", { class: "about" }, ...pairs);
}

function summarySection({ figures }) {
  const tile = (name, text, more, kind = "") => make("div", { class: "tile" },
    make("span", {}, name), make("b", { class: kind }, text), make("span", {}, more));
  const part = size => share(size / figures.makespan_s);
  const usable = figures.usable_bytes === null ? "no limit known" : `of ${bytes(figures.usable_bytes)} usable`;
  const interval = figures.low_s === null ? "no interval is known" : `90 %: ${figure3(figures.low_s)} to ${figure3(figures.high_s)} s`;
  return section("summary", "The step", make("div", { class: "tiles" },
    tile("step", seconds(figures.step_s), interval),
    tile(`${figures.unit}/s/device`, figure(figures.rate), `${figures.devices} devices`),
    figures.mfu ? tile("MFU", share(figures.mfu), "of the peak, the model's own FLOPs") : null,
    tile("memory", bytes(figures.peak_bytes), usable),
    tile("fits", figures.fits ? "yes" : "no", "in the memory of each device", figures.fits ? "good" : "bad"),
    tile("computing", part(figures.busy_s), `${seconds(figures.busy_s)} of the mean device`),
    tile("exposed communication", part(figures.exposed_s), `${seconds(figures.exposed_s)} in which nothing computes`),
    tile("bubble", part(figures.bubble_s), `${seconds(figures.bubble_s)} idle`)));
}

const WAYS = { device: "the mean device", kind: "the critical path, by kind of work", operator: "the critical path, by operator",
  module: "the critical path, by module of the model", axis: "the critical path, by mesh axis", phase: "the critical path, by phase" };

function boundSection(step) {
  const { figures: { makespan_s: whole }, path, stages } = step;
  const place = make("div");
  const show = by => {
    const rows = Object.entries(step.breakdowns[by]).sort((a, b) => b[1] - a[1])
      .map(([name, size]) => [name, size, seconds(size), share(size / whole)]);
    place.replaceChildren(barTable(["part", "time", "share"], rows, 14));
  };
  show("device");
  const computing = whole - path.moving - path.launching;
  const rows = stages.map(([stage, devices, busy, exposed, bubble]) => make("tr", {},
    ...[stage, devices, ...[busy, exposed, bubble].map(size => share(size / whole))].map(text => make("td", {}, String(text)))));
  const head = make("tr", {}, ...["stage", "devices", "busy", "exposed", "bubble"].map(text => make("th", { scope: "col" }, text)));
  return section("bound", "What holds it back",
    make("p", {}, `The critical path is ${path.tasks.toLocaleString("en-US")} tasks, each of which starts when the one before ends: ` +
      `${share(computing / whole)} computing, ${share(path.moving / whole)} communicating, ${share(path.launching / whole)} launching kernels.`),
    make("div", { class: "controls" }, choice("seconds of", Object.keys(step.breakdowns).map(by => [by, WAYS[by]]), show)), place,
    make("h3", {}, "Stages of the pipeline"),
    make("div", { class: "scroll" }, make("table", { class: "bars" }, make("thead", {}, head), make("tbody", {}, ...rows))));
}

function whatIfSection(step) {
  const rows = step.what_ifs.map(([change, time, gain]) => [change, gain, seconds(time), seconds(gain), share(gain / step.figures.makespan_s)]);
  return section("what-ifs", "What if",
    soft("Each was simulated with that one thing changed. Gains do not add up."),
    rows.length ? barTable(["change", "step", "gain", "share"], rows, 20) : soft("Nothing takes time."));
}

const GUESSES = [[/assum/i, "assumption"], [/not measured|taken over/i, "taken over"], [/from memory/i, "from memory"], [/fitted/i, "fitted"]];

function assumptionsSection({ assumptions, notes }) {
  const ground = row => (GUESSES.find(([pattern]) => pattern.test(row[3])) || [null, ""])[1];
  const table = new SortedTable([
    { label: "figure", kind: "text", text: row => row[0], key: row => row[0] },
    { label: "value", text: row => `${figure(row[1])} ${row[2] === "1" ? "" : row[2]}` },
    { label: "rests on", kind: "text", text: ground, key: ground },
    { label: "source", kind: "long", text: row => row[3] },
  ], assumptions, { page: 12 });
  const words = make("input", { type: "search", placeholder: "assumption", size: "16", oninput: () => {
    const asked = words.value.trim().toLowerCase();
    table.filter(row => row.join(" ").toLowerCase().includes(asked) || ground(row).includes(asked));
  } });
  return section("assumptions", "Assumptions",
    notes.length ? make("ul", {}, ...notes.map(note => make("li", {}, note))) : null,
    make("h3", {}, "Figures of the cluster, with their sources"),
    make("div", { class: "controls" }, make("label", {}, "filter", words)), table.element);
}

function accuracySection({ interval, published }) {
  return section("accuracy", "How true", ...(interval ? intervalParts(interval) : [
    soft("Between which seconds a measured step lies is not known here: of this preset, or as the host's time is not among the costs."),
  ]), ...publishedParts(published));
}

function intervalParts({ low, high, level, spread, source, between, terms }) {
  const rows = terms.map(([kind, own, part]) => [kind, part, share(part), share(own)]);
  return [
    make("p", {}, `A measured step is expected between ${seconds(low)} and ${seconds(high)}, with ${share(level)} probability: ` +
      `of ten steps like this one, measured on other machines of the kind, ${Math.round(10 * level)} should lie within.`),
    soft(`The logarithm of measured over predicted seconds has a standard deviation of ${spread} on this preset (${source}), ` +
      "and on top, independent of it, what each kind of work below deviates by, times its share of the step; " +
      `${share(between)} of the variance is between machines, which steps of your own correct (distsim simulate --own-runs).`),
    rows.length ? make("h3", {}, "How well what the step consists of is known") : null,
    rows.length ? barTable(["kind of work", "share of the step", "its own deviation"], rows, 10) : null,
  ];
}

const percent = number => `${number < 0 ? "-" : "+"}${(100 * Math.abs(number)).toFixed(1)} %`;

function publishedParts({ device, rows, own, all, date }) {
  const within = ({ inside, intervals }) => `${inside} of ${intervals} lay within their 90 % intervals`;
  const ofAll = `Of ${all.rows} steps of all GPUs ${share(all.mean)} on average, and ${within(all)}.`;
  const said = rows.length
    ? `${own.rows} published steps on ${device} were predicted: ${share(own.mean)} off on average, ${within(own)}. ${ofAll}`
    : `No published step on ${device} is among those that were predicted. ${ofAll}`;
  const table = new SortedTable([
    { label: "source", kind: "long", text: row => row[0], key: row => row[0] },
    { label: "steps", text: row => String(row[1]), key: row => row[1] },
    { label: "mean error", text: row => share(row[2]), key: row => row[2] },
    { label: "median", text: row => share(row[3]), key: row => row[3] },
    { label: "bias", text: row => percent(row[4]), key: row => row[4] },
    { label: "worst", text: row => percent(row[5]), key: row => row[5] },
  ], rows);
  return [make("h3", {}, "Published steps, predicted"), make("p", {}, said), rows.length ? table.element : null,
    soft(`Predicted seconds over measured ones, less 1: a bias below 0 is predicted too fast. As of ${date}; ` +
      "distsim validate does it again, and says more.")];
}

function casePart(item) {
  const parts = [aboutPart(item)];
  if (item.step) parts.push(summarySection(item.step));
  else parts.push(section("summary", "The step", make("p", { class: "bad" }, "No plan fits in memory.")));
  if (item.plans) parts.push(plansSection(item.plans));
  if (item.step) {
    parts.push(new Timeline(item.step.timeline, item.step.path).element(), memorySection(item.step.memory, item.step.timeline.end),
      boundSection(item.step), whatIfSection(item.step));
  }
  return [...parts, assumptionsSection(item), ...(item.accuracy ? [accuracySection(item.accuracy)] : [])];
}

function clustersSection({ objective, header, rows, notes }, chosen) {
  const table = new SortedTable(header.map((label, n) => ({
    label, kind: n === 0 ? "text" : n === header.length - 1 ? "long" : "",
    ...(n === header.length - 1 ? { node: row => broken(row[n]) } : { text: row => row[n] }),
  })), rows, { chosen: row => { table.select(row); chosen(row[0]); } });
  const title = rows.length > 1 ? "Clusters" : "The training";
  const about = rows.length > 1 ? [soft(`The best by ${objective} first. Tap one to see its plans.`)] : [];
  return section("clusters", title, ...about, table.element,
    notes.length ? make("ul", {}, ...notes.map(note => make("li", {}, note))) : null);
}

{
  const shown = JSON.parse(document.getElementById("data").textContent);
  const place = make("div");
  const show = number => place.replaceChildren(...casePart(shown.cases[Number(number)]));
  const several = shown.cases.length > 1
    ? make("div", { class: "controls" }, choice("cluster", shown.cases.map((item, n) => [String(n), item.name]), show)) : null;
  const choose = name => {
    if (!several) return;
    const list = several.querySelector("select");
    list.value = String(shown.cases.findIndex(item => item.name === name));
    show(list.value);
  };
  const clusters = shown.clusters ? [clustersSection(shown.clusters, choose)] : [];
  document.getElementById("page").replaceChildren(make("h1", {}, shown.title), ...clusters, ...(several ? [several] : []), place,
    make("footer", {}, "Made by distsim: simulated, not measured."));
  show(0);
}
