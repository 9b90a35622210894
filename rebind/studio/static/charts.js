// Heatmaps and curves, drawn without a library. Both show their numbers to a pointer, to the arrow keys and to a screen
// reader, follow the color theme, and fit any width.
import { announce, el, newId, svg } from "./ui.js";

const sheet = new URL("charts.css", import.meta.url).href;
if (!document.querySelector(`link[href="${sheet}"]`)) document.head.append(el("link", { rel: "stylesheet", href: sheet }));

// A number as a person writes it: 0.0123, 12.3, 3.6·10⁻⁷, 10⁶.
export function number(x, digits = 3) {
  if (x == null) return "–";
  const size = Math.abs(x);
  if (size === 0 || (size >= 9.995e-4 && size < 1e5)) return String(Number(x.toPrecision(digits))).replace("-", "−");
  const [front, power] = x.toExponential(Math.min(digits, 3) - 2).split("e");
  const raised = [...String(Number(power))].map((letter) => (letter === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[letter])).join("");
  return Number(front) === 1 ? `10${raised}` : `${Number(front)}·10${raised}`.replace("-", "−");
}

// A small box of text beside what the pointer or the focus is on.
function tooltip(wrapper) {
  const box = el("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  wrapper.append(box);
  return {
    show(left, top, ...content) {
      box.replaceChildren(...content);
      box.hidden = false;
      const room = wrapper.clientWidth - box.offsetWidth;
      box.style.left = `${Math.max(0, Math.min(room, left - box.offsetWidth / 2))}px`;
      box.style.top = `${top - box.offsetHeight - 8}px`;
    },
    hide() {
      box.hidden = true;
    },
  };
}

// A grid of colored cells. `rows` and `columns` are labels; `describe(row, column)` is the text of a cell;
// `text(row, column)` is written into it. `update(levels)` colors the cells: -1 to 1, or null for none.
export function heatmap({ label, rows, columns, describe, text, kind = "", every = 0, rowClass = () => "" }) {
  const gap = every || (columns.length <= 12 ? 1 : 5);
  const head = el("div", { role: "row", class: "heat-row" }, el("span", { class: "heat-corner" }),
    columns.map((name, index) => el("span", { role: "columnheader", class: "heat-column", "aria-label": name }, index % gap === 0 ? name : "")));
  const cells = rows.map(() => columns.map(() => el("span", { role: "gridcell", class: "heat-cell", tabindex: -1 })));
  const body = rows.map((name, index) => el("div", { role: "row", class: "heat-row" },
    el("span", { role: "rowheader", class: `heat-label ${rowClass(index)}`, title: name }, name), cells[index]));
  const grid = el("div", { role: "grid", class: `heat ${kind}`, "aria-label": label, "aria-rowcount": rows.length + 1 }, head, body);
  grid.style.setProperty("--columns", columns.length);
  const wrapper = el("div", { class: "heat-wrapper" }, grid);
  const tip = tooltip(wrapper);
  const place = new Map(cells.flatMap((row, r) => row.map((cell, c) => [cell, [r, c]])));
  let at = [0, 0];
  cells[0]?.[0]?.setAttribute("tabindex", 0);

  function show(cell) {
    const [r, c] = place.get(cell);
    const outer = wrapper.getBoundingClientRect(), box = cell.getBoundingClientRect();
    tip.show(box.left - outer.left + box.width / 2, box.top - outer.top, describe(r, c));
  }
  function move(r, c) {
    const next = cells[Math.max(0, Math.min(rows.length - 1, r))][Math.max(0, Math.min(columns.length - 1, c))];
    cells[at[0]][at[1]].tabIndex = -1;
    at = place.get(next);
    next.tabIndex = 0;
    next.focus();
  }
  grid.addEventListener("pointerover", (event) => (place.has(event.target) ? show(event.target) : tip.hide()));
  grid.addEventListener("pointerleave", tip.hide);
  grid.addEventListener("focusin", (event) => place.has(event.target) && show(event.target));
  grid.addEventListener("focusout", tip.hide);
  grid.addEventListener("click", (event) => place.has(event.target) && move(...place.get(event.target)));
  grid.addEventListener("keydown", (event) => {
    const [r, c] = at;
    const to = { ArrowRight: [r, c + 1], ArrowLeft: [r, c - 1], ArrowUp: [r - 1, c], ArrowDown: [r + 1, c], Home: [r, 0], End: [r, columns.length - 1] }[event.key];
    if (!to) return;
    event.preventDefault();
    move(...to);
  });

  return {
    element: wrapper,
    update(levels) {
      cells.forEach((row, r) => row.forEach((cell, c) => {
        const level = levels[r][c];
        cell.classList.toggle("negative", level < 0);
        cell.classList.toggle("strong", Math.abs(level ?? 0) > 0.55);
        cell.style.setProperty("--level", `${Math.min(100, 100 * Math.abs(level ?? 0)).toFixed(1)}%`);
        cell.setAttribute("aria-label", describe(r, c));
        if (text) cell.textContent = text(r, c);
      }));
    },
    mark(chosen, { inRows = false } = {}) {
      const marks = inRows ? body.map((row) => row.firstChild) : [...head.children].slice(1);
      marks.forEach((mark, index) => mark.classList.toggle("marked", chosen.includes(index)));
      cells.forEach((row, r) => row.forEach((cell, c) => cell.classList.toggle("marked", chosen.includes(inRows ? r : c))));
    },
  };
}

// Scales: a forward map, and where the ticks are.
const SCALES = {
  linear: { map: (x) => x, ticks: linearTicks },
  log: { map: (x) => Math.log10(x), ticks: logTicks },
  symlog: { map: (x) => Math.sign(x) * Math.log10(1 + Math.abs(x)), ticks: (low, high) => [0, ...logTicks(1, high)] },
};

function linearTicks(low, high, whole = false) {
  const raw = Math.max((high - low || 1) / (whole ? 8 : 4), whole ? 1 : 0), power = 10 ** Math.floor(Math.log10(raw));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((m) => m * power).find((s) => s >= raw * 0.99);
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-6; t += step) ticks.push(Number(t.toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const steps = last - first <= 1 ? [1, 2, 5] : last - first <= 2 ? [1, 3] : [1];
  const stride = Math.max(1, Math.ceil((last - first) / 6));
  const ticks = [];
  for (let power = first; power <= last; power += stride) for (const s of steps) ticks.push(s * 10 ** power);
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}

const SHAPES = [
  (x, y) => svg("circle", { cx: x, cy: y, r: 3 }),
  (x, y) => svg("rect", { x: x - 2.7, y: y - 2.7, width: 5.4, height: 5.4 }),
  (x, y) => svg("path", { d: `M${x} ${y - 3.8}l3.8 3.8l-3.8 3.8l-3.8 -3.8z` }),
  (x, y) => svg("path", { d: `M${x} ${y - 3.6}l3.6 6.4h-7.2z` }),
];

const FLOOR = 1e-7; // of a logarithmic axis, relative to its largest value; what is below is drawn there

// Curves over one quantity. `update({title, x_label, x_scale, y_scale, series})` draws them, with each series as
// {label, color, x, mean, low, high}; `cursor(x)` marks a place.
export function chart({ height = 230, label = "", legend = true, onpick } = {}) {
  const drawing = svg("svg", { class: "chart-drawing", role: "img", tabindex: 0, height });
  const title = el("h4", { class: "chart-title" });
  const names = el("ul", { class: "legend", hidden: !legend });
  const frame = el("div", { class: "chart-frame" }, drawing);
  const element = el("figure", { class: "chart" }, title, frame, names);
  const tip = tooltip(frame);
  let panel = null, geometry = null, picked = null, cursorAt = null;

  const flat = (name) => panel.series.flatMap((one) => one[name] ?? []);

  function extent(values, scale, padding) {
    const usable = values.filter((v) => Number.isFinite(v) && (scale !== "log" || v > 0));
    if (!usable.length) return [scale === "log" ? 0.1 : 0, 1];
    let [low, high] = [Math.min(...usable), Math.max(...usable)];
    if (scale === "log") return [Math.max(low, high * FLOOR) / 1.15 ** padding, high * 1.15 ** padding];
    const room = padding * 0.06 * (high - low || Math.abs(high) || 1);
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  function draw() {
    const width = frame.clientWidth;
    if (!panel || !width) return;
    const xs = SCALES[panel.x_scale ?? "linear"], ys = SCALES[panel.y_scale ?? "linear"];
    const [x0, x1] = panel.x_range ?? extent(flat("x"), panel.x_scale, 0);
    const [y0, y1] = extent([...flat("low"), ...flat("high"), ...flat("mean")], panel.y_scale, 1);
    const left = 46, right = 12, top = 8, bottom = 40;
    const clamp = (v, low, high) => Math.max(low, Math.min(high, v));
    const px = (x) => left + (width - left - right) * ((xs.map(x) - xs.map(x0)) / (xs.map(x1) - xs.map(x0) || 1));
    const py = (y) => top + (height - top - bottom) * (1 - (ys.map(clamp(y, y0, y1)) - ys.map(y0)) / (ys.map(y1) - ys.map(y0) || 1));
    geometry = { px, py };
    const parts = [];
    for (const t of ys.ticks(y0, y1)) {
      parts.push(svg("line", { class: "grid-line", x1: left, x2: width - right, y1: py(t), y2: py(t) }));
      parts.push(svg("text", { class: "tick", x: left - 7, y: py(t) + 4, "text-anchor": "end" }, number(t, 3)));
    }
    let free = -Infinity;
    for (const t of xs.ticks(x0, x1, flat("x").every(Number.isInteger))) {
      if (px(t) - free < 26) continue;
      free = px(t);
      parts.push(svg("line", { class: "grid-line", x1: px(t), x2: px(t), y1: top, y2: height - bottom }));
      parts.push(svg("text", { class: "tick", x: px(t), y: height - bottom + 17, "text-anchor": "middle" }, number(t, 3)));
    }
    parts.push(svg("text", { class: "axis-name", x: left + (width - left - right) / 2, y: height - 5, "text-anchor": "middle" }, panel.x_label ?? ""));
    panel.series.forEach((one, index) => parts.push(line(one, index, px, py)));
    parts.push(svg("line", { class: "chart-cursor", y1: top, y2: height - bottom, visibility: "hidden" }));
    drawing.setAttribute("width", width);
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.replaceChildren(...parts);
    placeCursor();
  }

  function line(one, index, px, py) {
    const group = svg("g", { class: "series" });
    group.style.setProperty("--series", one.color);
    const points = one.x.map((x, i) => [px(x), one.mean[i] == null ? null : py(one.mean[i]), i]).filter(([, y]) => y != null);
    if (!points.length) return group;
    const path = (list) => list.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    if (one.low) {
      const band = [...points.map(([x, , i]) => [x, py(one.high[i])]), ...points.map(([x, , i]) => [x, py(one.low[i])]).reverse()];
      group.append(svg("path", { class: "band", d: `${path(band)}Z` }));
    }
    group.append(svg("path", { class: "line", d: path(points) }));
    if (points.length <= 40) group.append(...points.map(([x, y]) => SHAPES[index % SHAPES.length](x, y)));
    return group;
  }

  function placeCursor() {
    const mark = drawing.querySelector(".chart-cursor");
    const x = picked ?? cursorAt;
    if (!mark || x == null) return mark?.setAttribute("visibility", "hidden");
    const at = geometry.px(x);
    for (const name of ["x1", "x2"]) mark.setAttribute(name, at);
    mark.setAttribute("visibility", "visible");
  }

  const places = () => [...new Set(flat("x"))].sort((a, b) => a - b);
  const values = (x) => panel.series.map((one) => ({ ...one, y: one.mean[one.x.indexOf(x)] })).filter((one) => one.y != null);

  function pick(x, speak) {
    picked = x;
    placeCursor();
    if (x == null) return tip.hide();
    const here = values(x);
    const rows = here.map((one) => {
      const key = el("span", { class: "swatch" });
      key.style.setProperty("--series", one.color);
      return el("div", { class: "tip-row" }, key, el("span", {}, one.label), el("b", {}, number(one.y)));
    });
    tip.show(geometry.px(x), Math.min(...here.map((one) => geometry.py(one.y))), el("div", { class: "tip-head" }, `${panel.x_label ?? "x"}: ${number(x, 4)}`), ...rows);
    if (speak) announce(`${panel.x_label ?? "x"} ${number(x, 4)}: ${here.map((one) => `${one.label} ${number(one.y)}`).join(", ")}`);
  }

  drawing.addEventListener("pointermove", (event) => {
    if (!geometry || !places().length) return;
    const at = event.clientX - drawing.getBoundingClientRect().left;
    pick(places().reduce((best, x) => (Math.abs(geometry.px(x) - at) < Math.abs(geometry.px(best) - at) ? x : best)), false);
  });
  drawing.addEventListener("pointerleave", () => pick(null));
  drawing.addEventListener("blur", () => pick(null));
  drawing.addEventListener("click", () => picked != null && onpick?.(picked));
  drawing.addEventListener("keydown", (event) => {
    const all = panel ? places() : [], at = all.indexOf(picked ?? cursorAt);
    const to = { ArrowRight: at + 1, ArrowLeft: at < 0 ? all.length - 1 : at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined || !all.length) return;
    event.preventDefault();
    const x = all[Math.max(0, Math.min(all.length - 1, to))];
    pick(x, true);
    onpick?.(x);
  });
  new ResizeObserver(draw).observe(frame);

  return {
    element,
    update(next) {
      panel = next;
      title.textContent = next.title ?? "";
      title.hidden = !next.title;
      drawing.setAttribute("aria-label", `${label || next.title}. Curves: ${next.series.map((one) => one.label).join(", ")}. Use the left and right arrow keys to read their values.`);
      names.replaceChildren(...next.series.map((one) => {
        const key = el("span", { class: "swatch" });
        key.style.setProperty("--series", one.color);
        return el("li", {}, key, one.label);
      }));
      draw();
    },
    cursor(x) {
      cursorAt = x;
      placeCursor();
    },
  };
}

// A slider with its value beside its name.
export function slider(name, label, { min, max, step, value, oninput, spell = (x) => number(x) }) {
  const id = newId(name);
  const shown = el("output", { for: id, class: "slider-value" }, spell(value));
  const control = el("input", { type: "range", id, name, min, max, step, value });
  control.setAttribute("aria-valuetext", spell(value));
  const element = el("div", { class: "field slider", "data-field": name }, el("div", { class: "slider-row" }, el("label", { for: id }, label), shown), control, el("p", { class: "field-error", role: "alert", "data-error": name }));
  const set = (x) => {
    shown.textContent = spell(x);
    control.setAttribute("aria-valuetext", spell(x));
  };
  control.addEventListener("input", () => {
    set(Number(control.value));
    oninput(Number(control.value));
  });
  return { element, control, get value() { return Number(control.value); }, set value(x) { control.value = x; set(Number(control.value)); } };
}

// A scale of colors with its ends, for a heatmap.
export function colorScale(low, high, { kind = "", diverging = false } = {}) {
  return el("div", { class: `color-scale ${kind} ${diverging ? "diverging" : ""}`, "aria-hidden": "true" }, el("span", {}, low), el("i", {}), el("span", {}, high));
}

