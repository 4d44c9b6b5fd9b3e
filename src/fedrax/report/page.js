"use strict";
// Tooltips of the charts: the values at the pointer or at the position of the arrow keys. Names are set as text only.
const SPACE = "http://www.w3.org/2000/svg";
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
tip.setAttribute("role", "status");
document.body.append(tip);

const element = (name, attributes) => {
  const made = document.createElementNS(SPACE, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  return made;
};
const text = (value) => String(Number(value.toPrecision(4)));
const position = (value) => Number.isInteger(value) ? String(value) : text(value);
const visible = (m) => { const box = document.getElementById("m" + m); return box === null || box.checked; };
const place = ([low, high, start, end, log]) => (value) =>
  start + (end - start) * (log ? (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (value - low) / (high - low));

function follow(svg) {
  const data = JSON.parse(svg.dataset.curves), x = place(data.x), y = place(data.y);
  const all = [...new Set(data.series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  if (all.length === 0) return;
  for (const title of svg.querySelectorAll("title")) title.remove(); // the browser would show them over the tooltip
  const marks = element("g", {});
  svg.append(marks);
  let at = -1;

  const leave = () => { at = -1; tip.hidden = true; marks.replaceChildren(); };
  const show = (index) => {
    at = index;
    const value = all[index], near = [];
    for (const series of data.series) {
      if (!visible(series.m)) continue;
      let best = null;
      for (const point of series.points)
        if (best === null || Math.abs(x(point[0]) - x(value)) < Math.abs(x(best[0]) - x(value))) best = point;
      if (best !== null && Math.abs(x(best[0]) - x(value)) < 12) near.push([series, best]);
    }
    near.sort((a, b) => b[1][1] - a[1][1]);
    marks.replaceChildren(element("line", { class: "cursor", x1: x(value), x2: x(value), y1: data.y[3], y2: data.y[2] }));
    tip.replaceChildren();
    const head = document.createElement("b");
    head.textContent = data.name + " " + (data.names.length ? data.names[value] : position(value));
    tip.append(head);
    for (const [series, point] of near) {
      const color = "s" + (series.m % 7);
      marks.append(element("circle", { class: "pointed " + color, cx: x(point[0]), cy: y(point[1]), r: 4 }));
      const row = document.createElement("div"), dot = document.createElement("i");
      const label = document.createElement("em"), number = document.createElement("span");
      row.className = color;
      label.textContent = series.label;
      number.textContent = text(point[1]) + (point[2] ? " ± " + text(point[2]) : "");
      row.append(dot, label, number);
      tip.append(row);
    }
    tip.hidden = false;
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const left = box.left + x(value) * scale, room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const beside = left + 16 > room ? left - tip.offsetWidth - 16 : left + 16;
    tip.style.left = Math.max(8, Math.min(beside, room)) + window.scrollX + "px";
    tip.style.top = box.top + 14 * scale + window.scrollY + "px";
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const here = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    let best = 0;
    all.forEach((value, i) => { if (Math.abs(x(value) - here) < Math.abs(x(all[best]) - here)) best = i; });
    if (best !== at || tip.hidden) show(best);
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") leave();
    if (step === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(all.length - 1, at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step)));
  });
}
document.querySelectorAll("svg[data-curves]").forEach(follow);
document.documentElement.dataset.ready = "yes";
