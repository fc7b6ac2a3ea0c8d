"use strict";
// What all parts use: elements, whose contents are text and never HTML, and figures with their units.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}
const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const section = (id, title, ...children) => make("section", { id }, make("h2", {}, title), ...children);
const soft = text => make("p", { class: "soft" }, text);

function choice(label, options, changed) {
  const list = make("select", { onchange: () => changed(list.value) });
  for (const [value, text] of options) list.append(make("option", { value }, text));
  return make("label", {}, label, list);
}

function scaled(number, units) {
  const [size, unit] = units.find(([each]) => Math.abs(number) >= each) || units[units.length - 1];
  return `${Number((number / size).toPrecision(4))} ${unit}`;
}
const seconds = number => (number ? scaled(number, [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]]) : "0 s");
const bytes = number =>
  scaled(number, [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);
const share = number => `${(100 * number).toFixed(1)} %`;
const figure = number => Number(number.toPrecision(5)).toLocaleString("en-US", { maximumSignificantDigits: 5 });
const signed = number => `${number < 0 ? "-" : "+"}${seconds(Math.abs(number))}`;
const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Round steps from low to high, about so many.
function ticks(low, high, about) {
  const rough = (high - low) / about || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(each => each * power >= rough * 0.999) * power;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high * (1 + 1e-12); at += 1) found.push(at * step);
  return found;
}

function leftOut(said) {
  return said.length ? soft(`Left out here: ${said.join("; ")}.`) : null;
}
