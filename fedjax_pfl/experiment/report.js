"use strict";
// Draws the curves and the clients of a report from the numbers that the page holds. It loads nothing.
(() => {
  const numbers = JSON.parse(document.getElementById("numbers").textContent);
  const DASHES = ["none", "8 4", "2 3", "10 3 2 3", "5 5"];
  const SHOWN_IN_TIP = 12;
  const byId = (id) => document.getElementById(id);
  const colour = (number) => `var(--c${number % 8})`;
  const dashes = (number) => DASHES[number % DASHES.length];
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  function spread(values) {
    const middle = mean(values);
    return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
  }

  function add(parent, tag, attributes = {}, text = null) {
    const svg = tag === "svg" || parent.namespaceURI === "http://www.w3.org/2000/svg";
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== null) node.textContent = text;
    return parent.appendChild(node);
  }

  function sample(parent, style) {
    const svg = add(parent, "svg", { viewBox: "0 0 34 14", "aria-hidden": "true" });
    const look = { stroke: style.colour, "stroke-width": 2.5 };
    add(svg, "line", { x1: 1, x2: 33, y1: 7, y2: 7, "stroke-dasharray": style.dashes, ...look });
    if (style.hollow) add(svg, "circle", { cx: 17, cy: 7, r: 3, fill: "var(--page)", ...look });
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
    const first = Math.ceil(low / step - 1e-9);
    const found = Math.max(0, Math.floor(high / step + 1e-9) - first + 1);
    return Array.from({ length: found }, (_, at) => Number(((first + at) * step).toPrecision(12)));
  }

  // The evaluated rounds themselves where there is room for all of them.
  function roundTicks(rounds, x, count) {
    const fit = rounds.slice(1).every((round, at) => x(round) - x(rounds[at]) >= 40);
    return fit ? rounds : ticks(rounds[0], rounds[rounds.length - 1], count).filter(Number.isInteger);
  }

  function shown(value, unit) {
    if (unit === "%") return `${value.toFixed(2)} %`;
    const plain = value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6);
    return plain ? String(Number(value.toPrecision(5))) : value.toExponential(3);
  }

  // What is under the pointer, or where the arrow keys have led, is told in a box beside it.
  function tip(figure) {
    const box = add(figure, "div", { class: "tip", "aria-live": "polite", hidden: "" });
    return {
      hide: () => { box.hidden = true; },
      show(title, lines, x, y) {
        box.replaceChildren();
        add(box, "strong", {}, title);
        for (const { style, text } of lines) {
          const line = add(box, "div");
          if (style) sample(line, style);
          add(line, "span", {}, text);
        }
        box.hidden = false;
        const right = x + 14 + box.offsetWidth <= figure.clientWidth ? x + 14 : x - 14 - box.offsetWidth;
        box.style.left = `${Math.min(Math.max(0, right), Math.max(0, figure.clientWidth - box.offsetWidth))}px`;
        box.style.top = `${Math.max(0, y - box.offsetHeight / 2)}px`;
      },
    };
  }

  function place(svg, event) {
    const box = svg.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  // Mean and sample standard deviation of a metric over the runs that have it, in each round that all of them have:
  // where one has ended earlier, the mean of the others would be a jump.
  function pointsOf(members, metric, across) {
    const found = new Map();
    const held = members.filter((run) => run[across] && (run.values[metric] || []).some((value) => value !== null));
    for (const run of held) {
      run.values[metric].forEach((value, at) => {
        const x = run[across][at];
        if (value === null || x === null) return;
        const round = run.round[at];
        if (!found.has(round)) found.set(round, { round, xs: [], ys: [] });
        found.get(round).xs.push(x);
        found.get(round).ys.push(value * numbers.metrics[metric].scale);
      });
    }
    const whole = [...found.values()].filter(({ ys }) => ys.length === held.length);
    return whole.sort((a, b) => a.round - b.round).map(({ round, xs, ys }) => ({
      round, x: mean(xs), y: mean(ys), runs: ys.length, spread: ys.length > 1 ? spread(ys) : 0,
    }));
  }

  function curves() {
    const figure = byId("curves-figure");
    const [metric, beside, across, every] = ["metric", "beside", "across", "every"].map(byId);
    const svg = add(figure, "svg", { tabindex: 0, role: "img", id: "curve" });
    const told = tip(figure);
    const hidden = new Set();
    const alone = numbers.combinations.length === 1;
    let series = [], rounds = [], scales = null, cursor = null;

    [metric.value, beside.value = ""] = numbers.shown.length ? numbers.shown : [metric.value];
    const unit = (name) => (numbers.metrics[name].scale === 100 ? "%" : "");

    function choose() {
      const chosen = [metric.value, beside.value].filter((name, at, all) => name && all.indexOf(name) === at);
      series = chosen.flatMap((name, slot) => numbers.combinations.map((combination, number) => {
        const members = combination.runs.map((run) => numbers.runs[run]);
        const look = alone ? slot : number;
        const style = { colour: colour(look), dashes: dashes(look), hollow: slot === 1 };
        const title = numbers.metrics[name].label;
        const label = chosen.length === 1 ? combination.name : alone ? title : `${combination.name}, ${title}`;
        const apart = every && every.checked && members.length > 1 ? members : [];
        const each = apart.map((run) => pointsOf([run], name, across.value));
        return { key: `${slot}/${number}`, name, label, style, points: pointsOf(members, name, across.value), each };
      })).filter((line) => line.points.length);
      rounds = [...new Set(series.flatMap((line) => line.points.map((point) => point.round)))].sort((a, b) => a - b);
      legend();
      draw();
    }

    function legend() {
      const box = byId("lines");
      box.replaceChildren(box.firstElementChild);
      for (const line of series) {
        const label = add(box, "label");
        const toggle = add(label, "input", { type: "checkbox", value: line.label });
        toggle.checked = !hidden.has(line.key);
        toggle.addEventListener("change", () => {
          hidden[toggle.checked ? "delete" : "add"](line.key);
          draw();
        });
        sample(label, line.style);
        add(label, "span", {}, line.label);
      }
      for (const [text, all] of series.length > 2 ? [["all", true], ["none", false]] : []) {
        add(box, "button", { type: "button" }, text).addEventListener("click", () => {
          for (const line of series) hidden[all ? "delete" : "add"](line.key);
          legend();
          draw();
        });
      }
    }

    function draw() {
      const width = figure.clientWidth;
      const height = Math.round(Math.min(420, Math.max(260, width * 0.5)));
      const [left, right, top, bottom] = [58, width - 14, 26, height - 40];
      cursor = null;
      told.hide();
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.style.height = `${height}px`;
      const seen = series.filter((line) => !hidden.has(line.key));
      const all = seen.flatMap((line) => [line.points, ...line.each].flat());
      svg.setAttribute("aria-label", `${series.map((line) => line.label).join(", ")} across ${across.value}`);
      if (!all.length) {
        add(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no line is shown");
        scales = null;
        return;
      }
      const ends = (values) => {
        const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
        return low < high ? [low, high] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
      };
      const [firstX, lastX] = ends(all.map((point) => point.x));
      const [low, high] = ends(all.flatMap((point) => [point.y - point.spread, point.y + point.spread]));
      const scale = (from, to, start, end) => (value) => start + ((value - from) / (to - from)) * (end - start);
      const margin = (high - low) * 0.04;
      const [x, y] = [scale(firstX, lastX, left + 6, right - 6), scale(low - margin, high + margin, bottom, top)];
      scales = { x, y };
      for (const value of ticks(low - margin, high + margin, height / 55)) {
        add(svg, "line", { class: "rule", x1: left, x2: right, y1: y(value), y2: y(value) });
        add(svg, "text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, shown(value, ""));
      }
      const evaluated = rounds.filter((round) => firstX <= round && round <= lastX);
      const count = width / 90;
      const marks = across.value === "round" ? roundTicks(evaluated, x, count) : ticks(firstX, lastX, count);
      for (const value of marks) {
        add(svg, "line", { class: "axis", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4 });
        add(svg, "text", { x: x(value), y: bottom + 17, "text-anchor": "middle" }, shown(value, ""));
      }
      add(svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
      add(svg, "text", { x: right, y: height - 5, "text-anchor": "end" }, across.value);
      const labels = [...new Set(series.map((line) => numbers.metrics[line.name].label))];
      add(svg, "text", { class: "name", x: 4, y: 14 }, labels.join(" · "));
      const path = (points) => points.map((point) => `${x(point.x).toFixed(1)},${y(point.y).toFixed(1)}`).join(" ");
      for (const line of seen) {
        const group = add(svg, "g", { class: "line", "data-name": line.label });
        const { points, each, style } = line;
        const stroke = { fill: "none", stroke: style.colour };
        if (points.some((point) => point.spread)) {
          const edge = (sign) => points.map((point) => ({ x: point.x, y: point.y + sign * point.spread }));
          const around = path([...edge(1), ...edge(-1).reverse()]);
          add(group, "polygon", { class: "band", fill: style.colour, points: around });
        }
        for (const one of each) add(group, "polyline", { class: "thin", points: path(one), ...stroke });
        const dashed = { "stroke-width": 2, "stroke-dasharray": style.dashes };
        add(group, "polyline", { points: path(points), ...stroke, ...dashed });
        // Among more points than these, dots would hide the dashes.
        for (const point of points.length <= 40 ? points : points.slice(-1)) {
          add(group, "circle", {
            cx: x(point.x).toFixed(1), cy: y(point.y).toFixed(1), r: 3, stroke: style.colour, "stroke-width": 1.5,
            fill: style.hollow ? "var(--page)" : style.colour, "data-round": point.round, "data-value": point.y,
          });
        }
      }
      add(svg, "g", { class: "cursor" });
    }

    function read(round) {
      const marks = svg.querySelector(".cursor");
      marks.replaceChildren();
      cursor = round;
      const found = series.filter((line) => !hidden.has(line.key))
        .map((line) => ({ line, point: line.points.find((point) => point.round === round) }))
        .filter(({ point }) => point).sort((a, b) => b.point.y - a.point.y);
      if (!found.length) return told.hide();
      for (const { line, point } of found) {
        const [cx, cy] = [scales.x(point.x), scales.y(point.y)];
        add(marks, "circle", { cx, cy, r: 6, fill: "none", stroke: line.style.colour, "stroke-width": 2 });
      }
      const lines = found.slice(0, SHOWN_IN_TIP).map(({ line: { label, name, style }, point }) => {
        const seeds = point.runs > 1 ? ` ± ${shown(point.spread, unit(name))} (${point.runs} runs)` : "";
        const where = across.value === "round" ? "" : `, at ${shown(point.x, "")} ${across.value}`;
        return { style, text: `${label}: ${shown(point.y, unit(name))}${seeds}${where}` };
      });
      if (found.length > lines.length) lines.push({ text: `and ${found.length - lines.length} more` });
      const at = found[0].point;
      told.show(`round ${round}`, lines, scales.x(at.x), scales.y(at.y));
    }

    svg.addEventListener("pointermove", (event) => {
      if (!scales) return;
      const [px, py] = place(svg, event);
      let best = null;
      for (const line of series.filter((of) => !hidden.has(of.key))) {
        for (const point of line.points) {
          const distance = Math.hypot(scales.x(point.x) - px, (scales.y(point.y) - py) / 4);
          if (!best || distance < best.distance) best = { distance, round: point.round };
        }
      }
      if (best && best.round !== cursor) read(best.round);
    });
    const leave = () => {
      if (scales) svg.querySelector(".cursor").replaceChildren();
      cursor = null;
      told.hide();
    };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step || !scales) return;
      event.preventDefault();
      const at = cursor === null ? (step > 0 ? -1 : rounds.length) : rounds.indexOf(cursor);
      read(rounds[Math.min(rounds.length - 1, Math.max(0, at + step))]);
    });
    for (const control of [metric, beside, across, every]) if (control) control.addEventListener("change", choose);
    choose();
    window.addEventListener("resize", draw);
  }

  function clients() {
    const figure = byId("clients-figure");
    const about = "accuracy of each client, PRE and POST";
    const svg = add(figure, "svg", { tabindex: 0, role: "img", "aria-label": about, id: "strips" });
    const told = tip(figure);
    const ROW = 52;
    let dots = [], cursor = -1;

    function draw() {
      const width = figure.clientWidth;
      const height = ROW * numbers.strips.length + 30;
      const x = (accuracy) => 8 + accuracy * (width - 24);
      dots = [];
      cursor = -1;
      told.hide();
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.style.height = `${height}px`;
      for (let tenth = 0; tenth <= 10; tenth += width < 600 ? 2 : 1) {
        const anchor = tenth === 10 ? "end" : tenth ? "middle" : "start";
        add(svg, "line", { class: "rule", x1: x(tenth / 10), x2: x(tenth / 10), y1: 4, y2: height - 22 });
        add(svg, "text", { x: x(tenth / 10), y: height - 6, "text-anchor": anchor }, `${10 * tenth} %`);
      }
      numbers.strips.forEach((strip, row) => {
        const middle = ROW * row + 36;
        const style = colour(strip.combination);
        const name = `${numbers.combinations[strip.combination].name}, ${strip.point}`;
        const group = add(svg, "g", { class: "strip", "data-name": name });
        const look = { fill: strip.point === "PRE" ? style : "var(--page)", "fill-opacity": 0.45, stroke: style };
        strip.dots.forEach(([accuracy, run, client, samples, kind], at) => {
          const [cx, cy] = [x(accuracy), middle + (((at * 0.618) % 1) - 0.5) * 18];
          const given = { "data-client": client, "data-value": accuracy, ...look };
          if (kind === 0) add(group, "circle", { cx, cy, r: 3.5, ...given });
          else if (kind === 1) add(group, "rect", { x: cx - 3.5, y: cy - 3.5, width: 7, height: 7, ...given });
          else add(group, "path", { d: `M${cx - 4},${cy - 4}l8,8m0,-8l-8,8`, ...given });
          const who = `client ${client}${["", ", never trains", ", malicious"][kind]}`;
          dots.push({
            cx, cy, row,
            title: `${name}: ${(100 * accuracy).toFixed(2)} %`,
            text: `${who}, ${samples} samples scored; ${numbers.runs[run].name}`,
          });
        });
        let title = name;
        if (strip.mean !== null) {
          const at = { x1: x(strip.mean), x2: x(strip.mean), y1: middle - 13, y2: middle + 13 };
          add(group, "line", { stroke: "var(--text)", "stroke-width": 2.5, ...at });
          title += `, mean ${(100 * strip.mean).toFixed(2)} %`;
        }
        const [drawn, all] = [strip.dots.length, strip.clients];
        if (drawn < all) title += ` (${drawn} of ${all} dots, evenly spaced)`;
        add(group, "text", { class: "name", x: 8, y: middle - 19 }, title);
      });
      add(svg, "g", { class: "cursor" });
    }

    function read(at) {
      if (at === cursor) return;
      cursor = at;
      const dot = dots[at];
      const marks = svg.querySelector(".cursor");
      marks.replaceChildren();
      add(marks, "circle", { cx: dot.cx, cy: dot.cy, r: 7, fill: "none", stroke: "var(--text)", "stroke-width": 2 });
      told.show(dot.title, [{ text: dot.text }], dot.cx, dot.cy);
    }

    const leave = () => {
      cursor = -1;
      svg.querySelector(".cursor").replaceChildren();
      told.hide();
    };
    svg.addEventListener("pointermove", (event) => {
      const [px, py] = place(svg, event);
      const far = dots.map((dot) => Math.hypot(dot.cx - px, dot.cy - py));
      const nearest = far.reduce((best, distance, at) => (distance < far[best] ? at : best), 0);
      if (far[nearest] < 16) read(nearest);
      else leave();
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const row = cursor < 0 ? -1 : dots[cursor].row;
      const next = {
        ArrowLeft: () => Math.max(0, cursor - 1),
        ArrowRight: () => Math.min(dots.length - 1, cursor + 1),
        ArrowUp: () => Math.max(0, dots.findIndex((dot) => dot.row === Math.max(0, row - 1))),
        ArrowDown: () => Math.max(cursor, dots.findIndex((dot) => dot.row > row)),
      }[event.key];
      if (event.key === "Escape") leave();
      if (!next || !dots.length) return;
      event.preventDefault();
      read(next());
    });
    draw();
    window.addEventListener("resize", draw);
  }

  if (byId("curves-figure")) curves();
  if (byId("clients-figure")) clients();
})();
