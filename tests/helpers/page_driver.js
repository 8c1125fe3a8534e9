// What a reader does with the page, and what is there to see after each step; the answers are left in <pre id=observed>.
"use strict";
{
  const find = (id) => document.getElementById(id);
  const text = (id) => (find(id) ? find(id).textContent : null);
  const maps = Array.from(document.getElementsByClassName("map"));
  const lines = () => Array.from(document.getElementsByClassName("line")).length;
  const readings = () => Array.from(document.getElementsByClassName("chart")).map((chart) => chart.getElementsByTagName("p")[0]).filter(Boolean).map((p) => p.textContent);
  const press = (where, key) => {
    const event = new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true });
    where.dispatchEvent(event);
    return event.defaultPrevented;
  };
  const seen = { hacked: window.hacked === undefined ? null : window.hacked, injected: find("hacked") !== null };
  seen.sections = Array.from(document.getElementsByTagName("section")).map((section) => section.id);
  seen.maps = maps.length;
  seen.outside = ["src", "href"].flatMap((name) => Array.from(document.getElementsByTagName("*")).map((each) => each.getAttribute(name))).filter((url) => url && !url.startsWith("#") && !url.startsWith("data:"));
  if (maps.length) {
    seen.first = { status: text("status"), layer: find("layer").value, lines: lines(), readings: readings() };
    maps[2].focus();
    seen.prevented = press(maps[2], "ArrowDown");
    seen.down = { status: text("status"), layer: find("layer").value };
    for (let i = 0; i < 101; i += 1) press(maps[2], "ArrowLeft");
    seen.left = { status: text("status"), when: text("when"), readings: readings() };
    press(maps[2], "ArrowUp");
    press(maps[2], "ArrowUp");
    seen.up = find("layer").value;
    press(maps[2], "Enter");
    seen.focus = document.activeElement.id;
    press(find("charts"), "ArrowRight");
    seen.right = text("when");
    const pick = document.getElementsByClassName("pick");
    pick[pick.length - 1].click();
    seen.picked = find("layer").value;
    find("layer").value = "0";
    find("layer").dispatchEvent(new Event("change", { bubbles: true }));
    seen.chosen = text("status");
    const box = maps[2].getBoundingClientRect();
    const at = { clientX: box.left + 1, clientY: box.bottom - 1, bubbles: true };
    maps[2].dispatchEvent(new PointerEvent("pointermove", at));
    seen.tip = { text: text("tip"), hidden: find("tip").hidden };
    maps[2].dispatchEvent(new PointerEvent("pointerleave", {}));
    seen.gone = find("tip").hidden;
    maps[2].dispatchEvent(new MouseEvent("click", at));
    seen.clicked = text("status");
    const paths = (map) => Array.from(map.children).map((path) => path.getAttribute("d").length);
    const before = paths(maps[2]);
    find("paint").value = "sqnr";
    find("paint").dispatchEvent(new Event("change", { bubbles: true }));
    seen.painted = { paths: paths(maps[2]).length, drawn: paths(maps[2]).some((length) => length > 0), key: text("key") };
    find("paint").value = "cast";
    find("paint").dispatchEvent(new Event("change", { bubbles: true }));
    seen.restored = JSON.stringify(paths(maps[2])) === JSON.stringify(before);
  }
  if (find("filter")) {
    const groups = Array.from(find("decided").getElementsByTagName("tbody")[0].children);
    const rows = groups.flatMap((group) => Array.from(group.getElementsByTagName("tbody")[0].children));
    const type = (words) => {
      find("filter").value = words;
      find("filter").dispatchEvent(new Event("input", { bubbles: true }));
      return { shown: rows.filter((row) => !row.hidden).length, count: text("count") };
    };
    seen.filter = { all: type(""), some: type("UP  grad_output"), none: type("no such slot"), rows: rows.length, groups: groups.filter((group) => !group.hidden).length };
  }
  const headings = Array.from(find("sorted").getElementsByTagName("th"));
  const order = () => Array.from(find("sorted").getElementsByTagName("tbody")[0].children).map((row) => row.children[0].textContent);
  seen.orders = [order()];
  for (const [name, times] of [["flushed", 2], ["layer", 1], ["weight", 1]]) {
    const heading = headings.find((each) => each.textContent.startsWith(name));
    for (let i = 0; i < times; i += 1) heading.click();
    seen.orders.push([heading.getAttribute("aria-sort"), ...order()]);
  }
  find("theme").click();
  seen.theme = document.documentElement.getAttribute("data-theme");
  if (typeof getComputedStyle === "function") {
    seen.real = {
      overflow: document.documentElement.scrollWidth - window.innerWidth,
      dark: getComputedStyle(document.body).backgroundColor,
      fills: maps.map((map) => Array.from(map.children).map((path) => getComputedStyle(path).fill)),
      boxes: maps.map((map) => [map.getBoundingClientRect().width, map.getBoundingClientRect().height]),
      names: maps.length ? Array.from(document.getElementsByClassName("names")[0].children).map((name) => name.getBoundingClientRect().height) : [],
      images: Array.from(document.getElementsByTagName("img")).map((image) => image.naturalWidth),
    };
  }
  const answer = document.createElement("pre");
  answer.setAttribute("id", "observed");
  seen.wrong = window.wrong;
  answer.textContent = JSON.stringify(seen);
  document.body.append(answer);
}
