// A small part of Markdown as DOM nodes: code, headings, lists, quotes, bold, italic.
// Text enters the page through textContent only, so no output of the model can become markup.

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?/;
const INLINE = /(`+)(?!`)(.*?[^`])\1(?!`)|\*\*(?=\S)(.+?)\*\*|\*([^\s*](?:[^*\n]*[^\s*])?)\*/g;

/** Shows a growing text: only blocks that changed are built again. */
export class MarkdownView {
  #root;
  #sources = [];

  constructor(root) {
    this.#root = root;
  }

  update(text) {
    const blocks = split(text);
    blocks.forEach((block, i) => {
      if (block.source === this.#sources[i]) return;
      const old = this.#root.children[i];
      if (!old) this.#root.append(build(block));
      else if (!grow(old, block)) old.replaceWith(build(block));
    });
    while (this.#root.children.length > blocks.length) this.#root.lastElementChild.remove();
    this.#sources = blocks.map((block) => block.source);
  }
}

function kindOf(line) {
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (ITEM.test(line)) return "list";
  if (QUOTE.test(line)) return "quote";
  return "text";
}

function split(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let start = 0; start < lines.length; ) {
    if (!lines[start].trim()) {
      start += 1;
      continue;
    }
    const kind = kindOf(lines[start]);
    const end = ENDS[kind](lines, start);
    blocks.push({ kind, lines: lines.slice(start, end), source: lines.slice(start, end).join("\n") });
    start = end;
  }
  return blocks;
}

/** By kind, the line after a block that begins at line `start`. */
const ENDS = {
  code(lines, start) {
    const fence = FENCE.exec(lines[start])[1];
    const close = lines.findIndex((line, i) => i > start && closes(line, fence));
    return close < 0 ? lines.length : close + 1;
  },
  heading: (lines, start) => start + 1,
  rule: (lines, start) => start + 1,
  list(lines, start) {
    const belongs = (line) => line !== undefined && (kindOf(line) === "list" || /^\s{2,}\S/.test(line));
    let end = start + 1;
    for (; end < lines.length; end += 1) {
      const line = lines[end].trim() ? lines[end] : lines[end + 1];
      if (!belongs(line) || kindOf(line) === "code") break;
    }
    return end;
  },
  quote: (lines, start) => after(lines, start, (line) => kindOf(line) === "quote"),
  text: (lines, start) => after(lines, start, (line) => line.trim() && kindOf(line) === "text"),
};

function after(lines, start, belongs) {
  const length = lines.slice(start).findIndex((line) => !belongs(line));
  return length < 0 ? lines.length : start + length;
}

function closes(line, fence) {
  const marks = line.trim();
  return marks.length >= fence.length && marks === fence[0].repeat(marks.length);
}

const BUILDERS = {
  code(lines) {
    const node = element("div", "code");
    const language = FENCE.exec(lines[0])[2];
    const copy = element("button", "quiet", "Copy");
    copy.type = "button";
    copy.dataset.copy = "code";
    const head = element("div", "code-head");
    head.append(element("span", "", language || "text"), copy);
    const pre = document.createElement("pre");
    pre.tabIndex = 0;
    pre.append(element("code", "", codeOf(lines)));
    node.dataset.opening = lines[0];
    node.append(head, pre);
    return node;
  },
  heading(lines) {
    const [, marks, title] = HEADING.exec(lines[0]);
    // The page itself uses the first two heading levels.
    return inline(document.createElement(`h${Math.min(marks.length + 2, 6)}`), title);
  },
  rule: () => document.createElement("hr"),
  list: buildList,
  quote: (lines) =>
    inline(document.createElement("blockquote"), lines.map((line) => line.replace(QUOTE, "")).join("\n")),
  text: (lines) => inline(document.createElement("p"), lines.join("\n")),
};

function build(block) {
  return BUILDERS[block.kind](block.lines);
}

/** Update a block of code in its node, which keeps its scroll position; false if this is not possible. */
function grow(node, block) {
  if (block.kind !== "code" || node.dataset.opening !== block.lines[0]) return false;
  node.querySelector("code").textContent = codeOf(block.lines);
  return true;
}

function codeOf(lines) {
  const fence = FENCE.exec(lines[0])[1];
  const closed = lines.length > 1 && closes(lines.at(-1), fence);
  return lines.slice(1, closed ? -1 : undefined).join("\n");
}

function buildList(lines) {
  const root = document.createDocumentFragment();
  const open = []; // the lists around the present item, outermost first: { indent, node }
  let item = null;
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (!match) {
      if (line.trim()) inline(item, "\n" + line.trim());
      continue;
    }
    const [, space, mark, text] = match;
    while (open.length > 1 && space.length < open.at(-1).indent) open.pop();
    if (!open.length || space.length > open.at(-1).indent + 1) {
      const node = document.createElement(/\d/.test(mark) ? "ol" : "ul");
      if (node.tagName === "OL") node.start = parseInt(mark, 10);
      (item ?? root).append(node);
      open.push({ indent: space.length, node });
    }
    item = inline(document.createElement("li"), text);
    open.at(-1).node.append(item);
  }
  return root.firstElementChild;
}

function inline(node, text) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    node.append(text.slice(end, match.index));
    const [whole, , code, bold, italic] = match;
    if (code !== undefined) node.append(element("code", "", code.trim()));
    else if (bold !== undefined) node.append(inline(document.createElement("strong"), bold));
    else node.append(inline(document.createElement("em"), italic));
    end = match.index + whole.length;
  }
  node.append(text.slice(end));
  return node;
}

export function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}
