// Curves as SVG, drawn anew with each round. Line styles and markers tell them apart without colour; the page has the same numbers as a table.
"use strict";

const Curves = (() => {
  const SPACE = "http://www.w3.org/2000/svg";
  const W = 440, H = 190, LEFT = 56, RIGHT = 14, TOP = 10, BOTTOM = 36;

  function shape(name, attributes, text) {
    const element = document.createElementNS(SPACE, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // About `count` round numbers that cover low..high.
  function ticks(low, high, count) {
    const raw = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((k) => k >= raw * 0.999);
    const out = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(+(k * step).toPrecision(12));
    return out;
  }

  function marker(kind, x, y) {
    const common = { class: "f" + kind };
    if (kind === 1) return shape("rect", { ...common, x: x - 3, y: y - 3, width: 6, height: 6 });
    if (kind === 2) return shape("path", { ...common, d: `M${x} ${y - 4}l4 7h-8z` });
    return shape("circle", { ...common, cx: x, cy: y, r: 3 });
  }

  // A figure of some curves, each {name, points: [[x, y], ...]}, over rounds; `label` writes a value.
  function figure(title, unit, curves, label) {
    const all = curves.flatMap((curve) => curve.points);
    const xs = all.map((p) => p[0]), ys = all.map((p) => p[1]);
    let low = Math.min(...ys), high = Math.max(...ys);
    if (unit === "share") { low = Math.max(0, low - 0.02); high = Math.min(1, Math.max(high, low + 0.05) + 0.02); }
    else {
      if (unit === "count" || (low >= 0 && low < 0.5 * high)) low = 0; // a count is seen against nothing at all
      if (high === low) high = low + (Math.abs(low) || 1);
      if (low !== 0) low -= (high - low) * 0.06;
      high += (high - low) * 0.06;
    }
    const x0 = Math.min(1, ...xs), x1 = Math.max(x0 + 1, ...xs);
    const X = (v) => +(LEFT + (v - x0) / (x1 - x0) * (W - LEFT - RIGHT)).toFixed(1);
    const Y = (v) => +(H - BOTTOM - (v - low) / (high - low) * (H - TOP - BOTTOM)).toFixed(1);
    const out = document.createElement("figure"), caption = document.createElement("figcaption");
    caption.textContent = title;
    const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
    svg.setAttribute("aria-label", `${title} by round: ` + curves.map((c) => {
      const end = c.points[c.points.length - 1];
      return `${c.name} is ${label(end[1])} in round ${end[0]}, and was ${label(c.points[0][1])} in round ${c.points[0][0]}`;
    }).join("; "));
    for (const value of ticks(low, high, 5)) {
      svg.append(shape("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: Y(value), y2: Y(value) }));
      svg.append(shape("text", { x: LEFT - 6, y: Y(value) + 4, "text-anchor": "end" }, label(value)));
    }
    for (const value of ticks(x0, x1, 6)) {
      if (value !== Math.round(value)) continue;
      svg.append(shape("line", { class: "axis", x1: X(value), x2: X(value), y1: H - BOTTOM, y2: H - BOTTOM + 4 }));
      svg.append(shape("text", { x: X(value), y: H - BOTTOM + 17, "text-anchor": "middle" }, value));
    }
    svg.append(shape("line", { class: "axis", x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM }));
    svg.append(shape("text", { x: (LEFT + W - RIGHT) / 2, y: H - 3, "text-anchor": "middle" }, "round"));
    curves.forEach((curve, kind) => {
      const points = curve.points.map(([x, y]) => [X(x), Y(y)]);
      svg.append(shape("path", { class: `curve c${kind}`, d: "M" + points.map((p) => p.join(" ")).join("L"), "data-points": points.length }));
      for (const [x, y] of points.length <= 30 ? points : points.slice(-1)) svg.append(marker(kind, x, y));
      const name = document.createElement("span"), sample = shape("svg", { viewBox: "0 0 32 12", "aria-hidden": "true" });
      sample.append(shape("line", { class: `curve c${kind}`, x1: 0, x2: 32, y1: 6, y2: 6 }), marker(kind, 16, 6));
      name.append(sample, `${curve.name} ${label(curve.points[curve.points.length - 1][1])}`);
      caption.append(name);
    });
    out.append(caption, svg);
    return out;
  }

  return { figure };
})();
