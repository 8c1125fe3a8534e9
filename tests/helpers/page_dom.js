// As much of the DOM as the report's page uses, for Node: elements, text, attributes, events that bubble.  Anything else
// that the page's script should ask for is undefined here, and fails.  Standard input: {tree, driver}.
"use strict";
const { tree, driver } = JSON.parse(require("node:fs").readFileSync(0, "utf8"));

class Node_ {
  constructor(tag) { this.tag = tag; this.attributes = {}; this.children_ = []; this.listeners = {}; this.parentNode = null; this.hidden = false; this.value_ = null; }
  get id() { return this.attributes.id || ""; }
  get children() { return this.children_.filter((child) => typeof child !== "string"); }
  get textContent() { return this.children_.map((child) => (typeof child === "string" ? child : child.textContent)).join(""); }
  set textContent(text) { this.children_ = [String(text)]; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  getAttribute(name) { return name in this.attributes ? this.attributes[name] : null; }
  removeAttribute(name) { delete this.attributes[name]; }
  append(...nodes) {
    for (const each of nodes) {
      if (typeof each !== "string") {
        if (each.parentNode) each.parentNode.children_ = each.parentNode.children_.filter((child) => child !== each);
        each.parentNode = this;
      }
      this.children_.push(each);
    }
  }
  replaceChildren(...nodes) { this.children_ = []; this.append(...nodes); }
  get value() { return this.value_ !== null ? this.value_ : this.tag === "select" ? this.children[0].attributes.value : ""; }
  set value(text) {
    if (this.tag === "select" && !this.children.some((option) => option.attributes.value === text)) throw new Error(`no option ${text}`);
    this.value_ = text;
  }
  addEventListener(name, listener) { (this.listeners[name] = this.listeners[name] || []).push(listener); }
  dispatchEvent(event) { for (let at = this; at; at = event.bubbles || at === this ? (event.bubbles ? at.parentNode : null) : null) for (const listener of at.listeners[event.type] || []) listener(event); }
  click() { this.dispatchEvent(new Event_("click", { bubbles: true })); }
  focus() { document.activeElement = this; this.dispatchEvent(new Event_("focus", {})); }
  scrollIntoView() {}
  getBoundingClientRect() { return { left: 0, top: 0, width: 100, height: 100, right: 100, bottom: 100 }; }
  *below() { for (const child of this.children) { yield child; yield* child.below(); } }
  getElementsByTagName(tag) { return Array.from(this.below()).filter((each) => each.tag === tag); }
  getElementsByClassName(name) { return Array.from(this.below()).filter((each) => (each.attributes.class || "").split(" ").includes(name)); }
}
class Event_ {
  constructor(type, options) { this.type = type; Object.assign(this, options); this.defaultPrevented = false; }
  preventDefault() { this.defaultPrevented = true; }
}
const build = (given) => {
  const made = new Node_(given.tag);
  made.attributes = given.attributes;
  made.hidden = "hidden" in given.attributes;
  made.append(...given.children.map((child) => (typeof child === "string" ? child : build(child))));
  return made;
};
const document = build(tree);
document.documentElement = document.children[0];
document.body = document.getElementsByTagName("body")[0];
document.activeElement = document.body;
const named = new Map();  // found once: nothing with a name ever leaves the page
document.getElementById = (id) => {
  if (!named.has(id)) for (const each of document.below()) if (each.id === id) { named.set(id, each); break; }
  return named.get(id) || null;
};
document.createElement = (tag) => new Node_(tag);
document.createElementNS = (_, tag) => new Node_(tag);
const window = { innerWidth: 1280, innerHeight: 800, wrong: [], matchMedia: () => ({ matches: false }) };
const scope = { document, window, Event: Event_, KeyboardEvent: Event_, MouseEvent: Event_, PointerEvent: Event_, getComputedStyle: null };
const play = (code) => new Function(...Object.keys(scope), code)(...Object.values(scope));
for (const script of document.getElementsByTagName("script")) if (!script.attributes.type) play(script.textContent);
play(driver);
process.stdout.write(document.getElementById("observed").textContent);
