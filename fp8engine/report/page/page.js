// What moves on the page: reading a cell of the maps, the charts of one layer, the filter of the decisions, the order of
// the layers, the theme.
// Names are only ever set as text.  The numbers come from the page itself, as fp8engine/report/page/data.py wrote them.
"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data").textContent);
  const { steps, casts, layers, roles } = data;
  const state = { layer: 0, column: steps.length - 1, role: 0 };

  // ---- numbers, out of their letters ------------------------------------------------------------------------------
  const LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_";
  const unpack = (text, width, turn) => steps.map((_, i) => {
    let n = 0;
    for (const letter of text.slice(i * width, (i + 1) * width)) n = n * 64 + LETTERS.indexOf(letter);
    if (n === 64 ** width - 1) return null;
    return n === 64 ** width - 2 ? false : turn(n);
  });
  const percent = (n) => (n === 0 ? 0 : 100 * 10 ** ((n - 1) / 500 - 8));
  for (const layer of layers) {
    for (const slot of Object.values(layer.slots)) {
      slot.cast = slot.cast.flatMap(([cast, length]) => Array(length).fill(cast));
      const seen = (row) => row.map((n, i) => (slot.cast[i] === null ? null : n));
      slot.amax = seen(unpack(slot.amax, 3, (n) => 10 ** ((n - 60000) / 1000)));
      slot.sqnr = seen(unpack(slot.sqnr, 2, (n) => (n - 1000) / 10));
      slot.crest = seen(unpack(slot.crest, 2, (n) => 2 ** (n / 100)));
      slot.flushed = seen(unpack(slot.flushed, 2, percent));
      slot.saturated = seen(unpack(slot.saturated, 2, percent));
    }
  }
  const plain = (key) => (slot, i) => (slot && typeof slot[key][i] === "number" ? slot[key][i] : null);
  const amax = plain("amax");
  const scale = (slot, i) => {
    const cast = slot && slot.cast[i] !== null ? casts[slot.cast[i]] : null;
    const most = amax(slot, i);
    return cast && cast.max && most !== null ? (most * 2 ** cast.margin) / cast.max : null;
  };
  const MEASURES = [
    { title: "SQNR", unit: "dB, of the cast", get: plain("sqnr") },
    { title: "flushed to zero", unit: "% of elements", least: 0.1, get: plain("flushed") },
    { title: "saturated", unit: "% of elements", least: 0.1, get: plain("saturated") },
    { title: "amax", unit: "largest magnitude", log: true, get: amax },
    { title: "scale", unit: "amax over the format's largest value", log: true, get: scale },
    { title: "amax / rms", unit: "outliers", log: true, get: plain("crest") },
  ];
  const show = (n) => {
    if (n === null) return "–";
    const size = Math.abs(n);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) return n.toExponential(1).replace("e+", "e").replace(".0e", "e");
    return String(Number(n.toPrecision(3)));
  };
  const castOf = (slot, i) => (slot && slot.cast[i] !== null && slot.cast[i] !== undefined ? casts[slot.cast[i]].label : "not seen");
  const told = (slot, i) => {
    if (castOf(slot, i) === "not seen") return ["not seen at this step"];
    const words = slot.sqnr[i] === false ? "a finite value became Inf" : slot.sqnr[i] === null ? "exact" : "";
    const lines = [castOf(slot, i), words || `SQNR ${show(MEASURES[0].get(slot, i))} dB`, `amax ${show(amax(slot, i))}`];
    lines.push(`flushed ${show(MEASURES[1].get(slot, i))} %`, `saturated ${show(MEASURES[2].get(slot, i))} %`);
    if (slot.nonfinite && slot.nonfinite[i]) lines.push(`${slot.nonfinite[i]} NaN or Inf`);
    return lines;
  };

  // ---- small helpers --------------------------------------------------------------------------------------------
  const within = (n, least, most) => Math.min(Math.max(n, least), most);
  const node = (name, attributes, text) => {
    const made = document.createElement(name);
    for (const key of Object.keys(attributes || {})) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const shape = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key of Object.keys(attributes)) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // ---- maps -----------------------------------------------------------------------------------------------------
  const maps = Array.from(document.getElementsByClassName("map"));
  const names = Array.from(document.getElementsByClassName("names")).flatMap((each) => Array.from(each.children));
  const cursors = maps.map((map) => {
    const cursor = node("div", { class: "cursor" });
    const row = node("div", { class: "rowmark" });
    map.parentNode.append(row, cursor);
    return { cursor, row };
  });
  const placeCursors = () => {
    const high = 100 / layers.length, wide = 100 / steps.length;
    cursors.forEach(({ cursor, row }, i) => {
      row.setAttribute("style", `top:${state.layer * high}%;height:${high}%`);
      const here = `left:${state.column * wide}%;width:${wide}%;top:${state.layer * high}%;height:${high}%`;
      cursor.setAttribute("style", i === state.role ? here : "display:none");
    });
    names.forEach((name, i) => name.setAttribute("class", i === state.layer ? "on" : ""));
  };
  const describe = (layer, role, column) => {
    const from = data.thinned && column > 0 ? `steps ${steps[column - 1] + 1}–${steps[column]}` : `step ${steps[column]}`;
    return [`${layers[layer].name}.${role}`, from, ...told(layers[layer].slots[role], column)];
  };
  const say = () => {
    const status = find("status");
    if (status) status.textContent = describe(state.layer, roles[state.role], state.column).join("  ·  ");
  };
  const tip = find("tip");
  const cell = (map, event) => {
    const box = map.getBoundingClientRect();
    const x = within(Math.floor(((event.clientX - box.left) / (box.width || 1)) * steps.length), 0, steps.length - 1);
    const y = within(Math.floor(((event.clientY - box.top) / (box.height || 1)) * layers.length), 0, layers.length - 1);
    return { x, y };
  };
  maps.forEach((map, i) => {
    map.addEventListener("pointermove", (event) => {
      const { x, y } = cell(map, event);
      tip.textContent = describe(y, roles[i], x).join("\n");
      tip.hidden = false;
      const left = within(event.clientX + 14, 0, Math.max(window.innerWidth - 350, 0));
      tip.setAttribute("style", `left:${left}px;top:${Math.min(event.clientY + 16, window.innerHeight - 140)}px`);
    });
    map.addEventListener("pointerleave", () => { tip.hidden = true; });
    map.addEventListener("click", (event) => {
      const { x, y } = cell(map, event);
      choose({ layer: y, column: x, role: i });
    });
    map.addEventListener("keydown", (event) => {
      const moves = { ArrowUp: ["layer", -1], ArrowDown: ["layer", 1], ArrowLeft: ["column", -1], ArrowRight: ["column", 1] };
      const move = moves[event.key];
      if (event.key === "Enter") find("charts").focus();
      if (!move) return;
      event.preventDefault();
      choose({ role: i, [move[0]]: state[move[0]] + move[1] });
    });
    map.addEventListener("focus", () => choose({ role: i }));
  });

  // Instead of the format, a number in five steps from good (pale) to bad (dark).
  const PAINTS = {
    sqnr: { at: [30, 26, 22, 16], worse: (n, edge) => n < edge, get: MEASURES[0].get, say: (n) => `${n} dB`, first: "≥ " },
    flushed: { at: [0.1, 1, 5, 20], worse: (n, edge) => n > edge, get: MEASURES[1].get, say: (n) => `${n} %`, first: "≤ " },
    crest: { at: [8, 32, 128, 512], worse: (n, edge) => n > edge, get: MEASURES[5].get, say: String, first: "≤ " },
  };
  const HEAT = ["#d8ecd9", "#f6df8f", "#f2a65a", "#d9573c", "#8c1d3f"];
  const asFormats = maps.map((map) => Array.from(map.children));
  const key = find("key"), formatKey = key ? Array.from(key.children) : [];
  const paint = (name) => {
    const how = PAINTS[name];
    maps.forEach((map, m) => {
      if (!how) { map.replaceChildren(...asFormats[m]); return; }
      const paths = HEAT.map(() => "");
      layers.forEach((layer, y) => steps.forEach((_, x) => {
        const n = how.get(layer.slots[roles[m]], x);
        if (n !== null) paths[how.at.filter((edge) => how.worse(n, edge)).length] += `M${x} ${y}.06h1v.88h-1z`;
      }));
      map.replaceChildren(...paths.map((d, i) => shape("path", { fill: HEAT[i], d })));
    });
    if (!how) { key.replaceChildren(...formatKey); return; }
    const hatched = formatKey[formatKey.length - 1];
    key.replaceChildren(...HEAT.map((colour, i) => {
      const item = node("li", {});
      const word = i === 0 ? how.first : i === HEAT.length - 1 ? (name === "sqnr" ? "< " : "> ") : (name === "sqnr" ? "down to " : "up to ");
      item.append(node("i", { style: `background:${colour}` }), node("span", {}, word + how.say(how.at[Math.min(i, how.at.length - 1)])));
      return item;
    }), hatched);
  };
  if (find("paint")) find("paint").addEventListener("change", () => paint(find("paint").value));

  // ---- charts of one layer --------------------------------------------------------------------------------------
  const W = 330, H = 132, LEFT = 46, RIGHT = 6, TOP = 8, BOTTOM = 18;
  const acrossOf = (i) => (steps.length < 2 ? (W + LEFT) / 2 : LEFT + ((W - LEFT - RIGHT) * (steps[i] - steps[0])) / (steps[steps.length - 1] - steps[0]));
  const rounded = (low, high, most) => {
    const rough = (high - low) / most || 1;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * unit).find((each) => each >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) found.push(Number((i * step).toPrecision(10)));
    return found;
  };
  const rangeOf = (measure, values) => {
    const numbers = values.flat().filter((n) => n !== null && (!measure.log || n > 0)).map((n) => (measure.log ? Math.log10(n) : n));
    if (!numbers.length) return null;
    let low = Math.min(...numbers), high = Math.max(...numbers);
    if (measure.least) { low = 0; high = Math.max(high, measure.least); }
    const room = measure.least ? high * 0.06 : Math.max((high - low) * 0.1, measure.log ? 0.15 : 0.5);
    return { low: measure.least ? 0 : low - room, high: high + room };
  };
  const chart = (measure) => {
    const slots = roles.map((role) => layers[state.layer].slots[role]);
    const values = slots.map((slot) => steps.map((_, i) => measure.get(slot, i)));
    const range = rangeOf(measure, values);
    const outside = node("div", { class: "chart" });
    const title = node("h3", {}, measure.title);
    title.append(node("span", {}, measure.unit));
    const picture = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${measure.title} of ${layers[state.layer].name}` });
    outside.append(title, picture);
    if (!range) {
      picture.append(shape("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "nothing to draw"));
      return outside;
    }
    const up = (n) => TOP + ((H - TOP - BOTTOM) * (range.high - (measure.log ? Math.log10(n) : n))) / (range.high - range.low);
    const lines = rounded(range.low, range.high, 4).filter((tick) => !measure.log || range.high - range.low < 1 || Number.isInteger(tick));
    for (const tick of lines) {
      const value = measure.log ? 10 ** tick : tick;
      picture.append(shape("path", { class: "grid", d: `M${LEFT} ${up(value).toFixed(1)}H${W - RIGHT}` }));
      picture.append(shape("text", { x: LEFT - 6, y: up(value) + 4, "text-anchor": "end" }, show(value)));
    }
    const ends = steps.length < 2 ? [0] : [0, steps.length - 1];
    ends.forEach((i, k) => picture.append(shape("text", { x: acrossOf(i), y: H - 4, "text-anchor": k ? "end" : "start" }, String(steps[i]))));
    values.forEach((row, k) => {
      let path = "", pen = "M";
      row.forEach((n, i) => {
        if (n === null || (measure.log && n <= 0)) { pen = "M"; return; }
        path += `${pen}${acrossOf(i).toFixed(1)} ${up(n).toFixed(1)}`;
        if (pen === "M") path += "h.01";
        pen = "L";
      });
      if (path) picture.append(shape("path", { class: `line r${k}`, d: path }));
    });
    picture.append(shape("path", { class: "hair", d: `M${acrossOf(state.column).toFixed(1)} ${TOP}V${H - BOTTOM}` }));
    const reading = node("p", {});
    roles.forEach((role, k) => reading.append(node("b", { class: `r${k}`, title: role }, show(values[k][state.column]))));
    outside.append(reading);
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const x = ((event.clientX - box.left) / (box.width || 1)) * W;
      let best = 0;
      steps.forEach((_, i) => { if (Math.abs(acrossOf(i) - x) < Math.abs(acrossOf(best) - x)) best = i; });
      if (best !== state.column) choose({ column: best });
    });
    return outside;
  };

  // ---- one choice, drawn everywhere -----------------------------------------------------------------------------
  const choose = (change) => {
    Object.assign(state, change);
    state.layer = within(state.layer, 0, layers.length - 1);
    state.column = within(state.column, 0, steps.length - 1);
    placeCursors();
    say();
    find("layer").value = String(state.layer);
    find("charts").replaceChildren(...MEASURES.map(chart));
    const now = roles.map((role) => `${role} ${castOf(layers[state.layer].slots[role], state.column)}`);
    find("when").textContent = `step ${steps[state.column]}:  ${now.join(",  ")}`;
  };
  if (layers.length) {
    find("layer").addEventListener("change", () => choose({ layer: Number(find("layer").value) }));
    find("charts").addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      choose({ column: state.column + move });
    });
    for (const button of Array.from(document.getElementsByClassName("pick"))) {
      button.addEventListener("click", () => {
        choose({ layer: Number(button.getAttribute("data-layer")) });
        find("detail").scrollIntoView();
        find("charts").focus();
      });
    }
    choose({});
  }

  // ---- decisions ------------------------------------------------------------------------------------------------
  const filter = find("filter");
  if (filter) {
    const groups = Array.from(find("decided").getElementsByTagName("tbody")[0].children).map((row) => {
      const changes = Array.from(row.getElementsByTagName("tbody")[0].children);
      const about = row.children[1].textContent;
      return { row, changes, texts: changes.map((change) => `${about} ${change.textContent}`.toLowerCase()) };
    });
    const sieve = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0, all = 0;
      for (const { row, changes, texts } of groups) {
        changes.forEach((change, i) => { change.hidden = !words.every((word) => texts[i].includes(word)); });
        const shown = changes.filter((change) => !change.hidden).length;
        row.hidden = !shown;
        left += shown;
        all += changes.length;
      }
      find("count").textContent = words.length ? `${left} of ${all}` : `${all} changes`;
    };
    filter.addEventListener("input", sieve);
    sieve();
  }

  // ---- order of the layers --------------------------------------------------------------------------------------
  const headings = Array.from(find("sorted").getElementsByTagName("th"));
  const body = find("sorted").getElementsByTagName("tbody")[0];
  headings.forEach((heading, column) => {
    heading.setAttribute("tabindex", "0");
    const order = () => {
      const down = heading.getAttribute("aria-sort") !== "descending" && column > 0;
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.children[column].getAttribute("data-by") ?? row.children[column].textContent;
      const compare = (a, b) => (isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b));
      body.append(...Array.from(body.children).sort((a, b) => (down ? compare(b, a) : compare(a, b))));
    };
    heading.addEventListener("click", order);
    heading.addEventListener("keydown", (event) => { if (event.key === "Enter") order(); });
  });

  // ---- light and dark -------------------------------------------------------------------------------------------
  find("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.getAttribute("data-theme") || (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.setAttribute("data-theme", dark === "dark" ? "light" : "dark");
  });
})();
