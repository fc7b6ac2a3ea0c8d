// Memory over time by kind, as areas on each other, with what is usable of the device.

function memorySection(memory, end) {
  const place = make("div");
  const info = make("output");
  const show = number => place.replaceChildren(...memoryOf(memory, memory.ranks[Number(number)], end, info));
  show(0);
  const choices = memory.ranks.map((rank, n) => [String(n), rank.label]);
  return section("memory", "Memory",
    make("div", { class: "controls" }, choices.length > 1 ? choice("devices", choices, show) : null),
    place, leftOut(memory.left_out));
}

function memoryOf(memory, rank, end, info) {
  const peak = rank.peak.reduce((a, b) => a + b, 0);
  const over = rank.usable !== null && peak > rank.usable;
  const limit = rank.usable === null ? "no limit is known" : `${bytes(rank.usable)} usable`;
  info.textContent = rank.times ? "Point at the picture, or tap it, to read what is in use at a time." : "";
  const kinds = memory.kinds.map(([name, colour], n) => ({ name, colour, n, peak: rank.peak[n] }))
    .filter(kind => kind.peak || (rank.by_kind && rank.by_kind[kind.n].some(Boolean)));
  const rows = kinds.map(kind => {
    const swatch = make("i", { class: "swatch" });
    swatch.style.background = kind.colour;
    return make("tr", {}, make("td", { class: "text" }, swatch, kind.name), make("td", {}, bytes(kind.peak)),
      make("td", {}, share(kind.peak / (peak || 1))));
  });
  const head = make("tr", {}, make("th", { class: "text" }, "at the peak"), make("th", {}, bytes(peak)), make("th", {}, "share"));
  return [
    make("p", { class: over ? "bad" : "" }, `${rank.label}: the most in use is ${bytes(peak)}, of ${limit}` +
      (over ? `: ${bytes(peak - rank.usable)} too much` : "")),
    rank.times ? memoryPicture(kinds, rank, end, info) : null, rank.times ? info : null,
    make("div", { class: "scroll" }, make("table", { class: "bars" }, make("thead", {}, head), make("tbody", {}, ...rows))),
    soft("The peak is that of the order in which kernels are issued, as an allocator serves them; over time it may differ, as communication runs beside compute."),
  ].filter(Boolean);
}

function memoryPicture(kinds, rank, end, info) {
  const [width, height] = window.innerWidth < 700 ? [420, 260] : [860, 300];
  const room = { left: 62, right: 12, top: 12, bottom: 28 };
  const totals = rank.times.map((_, i) => rank.by_kind.reduce((sum, column) => sum + column[i], 0));
  const most = totals.reduce((a, b) => Math.max(a, b), 1);
  const limited = rank.usable !== null && rank.usable < 8 * most;
  const top = 1.06 * (limited ? Math.max(most, rank.usable) : most);
  const x = time => room.left + (time / end) * (width - room.left - room.right);
  const y = size => height - room.bottom - (size / top) * (height - room.top - room.bottom);
  const picture = draw("svg", { class: "picture", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "memory in use over the step" });
  const unit = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10, 1].find(each => top >= 2 * each) || 1;
  for (const each of ticks(0, top / unit, 5)) {
    picture.append(draw("line", { x1: room.left, x2: width - room.right, y1: y(each * unit), y2: y(each * unit), stroke: "var(--line)" }),
      draw("text", { x: room.left - 6, y: y(each * unit) + 4, "text-anchor": "end" }, bytes(each * unit)));
  }
  for (const each of ticks(0, end / 1e9, width / 120)) {
    picture.append(draw("text", { x: x(each * 1e9), y: height - 8, "text-anchor": "middle" }, seconds(each)));
  }
  const below = rank.times.map(() => 0);
  for (const { colour, n } of kinds) {
    const upper = rank.by_kind[n].map((size, i) => below[i] + size);
    const edge = sizes => rank.times.map((time, i) => [x(time), x(i + 1 < rank.times.length ? rank.times[i + 1] : end), y(sizes[i])]);
    const up = edge(upper).map(([from, to, at]) => `L${from.toFixed(1)} ${at.toFixed(1)}H${to.toFixed(1)}`).join("");
    const down = edge(below).reverse().map(([from, to, at]) => `L${to.toFixed(1)} ${at.toFixed(1)}H${from.toFixed(1)}`).join("");
    picture.append(draw("path", { d: `M${up.slice(1)}${down}Z`, fill: colour }));
    upper.forEach((size, i) => { below[i] = size; });
  }
  if (limited) {
    picture.append(draw("line", { x1: room.left, x2: width - room.right, y1: y(rank.usable), y2: y(rank.usable),
      stroke: "var(--bad)", "stroke-width": "1.5", "stroke-dasharray": "6 4" }),
    draw("text", { x: width - room.right - 4, y: y(rank.usable) - 5 < 12 ? y(rank.usable) + 14 : y(rank.usable) - 5,
      "text-anchor": "end" }, `usable: ${bytes(rank.usable)}`));
  }
  const mark = draw("line", { y1: room.top, y2: height - room.bottom, stroke: "var(--text)", visibility: "hidden" });
  picture.append(mark);
  const answer = event => {
    const frame = picture.getBoundingClientRect();
    const time = ((event.clientX - frame.left) * width / frame.width - room.left) / (width - room.left - room.right) * end;
    if (time < 0 || time > end) return;
    let i = 0;
    while (i + 1 < rank.times.length && rank.times[i + 1] <= time) i += 1;
    mark.setAttribute("visibility", "visible");
    for (const name of ["x1", "x2"]) mark.setAttribute(name, x(time));
    const parts = kinds.filter(({ n }) => rank.by_kind[n][i]).map(({ name, n }) => `${name} ${bytes(rank.by_kind[n][i])}`);
    info.textContent = `at ${seconds(time / 1e9)}: ${bytes(totals[i])} in use - ${parts.join(", ")}`;
  };
  picture.addEventListener("pointermove", answer);
  picture.addEventListener("click", answer);
  return picture;
}
