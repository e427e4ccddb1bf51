// The text of LoRA Blocks' rules, read and written as trainer_core/lora_files/blocks.py reads it: pattern=factor, by
// commas or lines; # begins a comment; the last rule that fits decides.

/** @typedef {{ pattern: string, factor: number, line: number, piece: number, fits: (name: string) => boolean }} Rule */

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
const LONGEST = 200, MOST_FACTOR = 1000; // characters of a rule's pattern; its factor
const ANY = null; // any letters, in a pattern

// The rules of a text: pattern and factor, how a name is compared, and where it stands (line, piece between commas).
/** @param {string} text @returns {Rule[]} */
export function parse(text) {
  return text.split("\n").flatMap((line, i) => codeOf(line).split(",").flatMap((piece, j) => {
    const rule = readPiece(piece);
    return rule ? [{ ...rule, line: i, piece: j, fits: matcher(rule.pattern) }] : [];
  }));
}

// The rule that decides about a block, if any does.
/** @param {Rule[]} rules @param {string} block */
export const deciding = (rules, block) => rules.findLast((rule) => rule.fits(block));

// The text with a factor for a block, all other rules and comments as they were. `rest`: the factor without a rule.
// A rule that says what is so without it goes once the slider is let go (`settled`), so that it keeps its place before.
/** @param {string} text @param {string} block @param {number} factor @param {number} rest @param {boolean} settled */
export function write(text, block, factor, rest, settled) {
  const without = remove(text, block);
  const free = deciding(parse(without), block)?.factor ?? rest;
  if (settled && factor === 1 && rest === 1 && free === 1) return without;
  const rule = deciding(parse(text), block);
  if (rule?.pattern === block) return rule.factor === factor ? text : change(text, rule, factor);
  return `${without}${without && !without.endsWith("\n") ? "\n" : ""}${block}=${factor}`;
}

/** @param {string} line */
const codeOf = (line) => line.split("#", 1)[0];

/** @param {string} piece */
function readPiece(piece) {
  const cut = piece.lastIndexOf("="), pattern = piece.slice(0, Math.max(cut, 0)).trim();
  const number = piece.slice(cut + 1).trim(), factor = Number(number);
  const valid = pattern && pattern.length <= LONGEST && NUMBER.test(number) && Math.abs(factor) <= MOST_FACTOR;
  return valid ? { pattern, factor } : null;
}

// Another number in a rule.
/** @param {string} text @param {Rule} rule @param {number} factor */
function change(text, rule, factor) {
  const lines = text.split("\n"), line = lines[rule.line], code = codeOf(line), pieces = code.split(",");
  pieces[rule.piece] = pieces[rule.piece].replace(/=(\s*)[^=\s]+(\s*)$/, (_, before, after) =>
    `=${before}${factor}${after}`);
  lines[rule.line] = pieces.join(",") + line.slice(code.length);
  return lines.join("\n");
}

// The text without a block's own rules; a line that held nothing else goes with them.
/** @param {string} text @param {string} block */
function remove(text, block) {
  return text.split("\n").flatMap((line) => {
    const code = codeOf(line), comment = line.slice(code.length), pieces = code.split(",");
    const others = pieces.filter((piece) => readPiece(piece)?.pattern !== block);
    if (others.length === pieces.length) return [line];
    if (others.every((piece) => !piece.trim())) return comment ? [comment] : [];
    const kept = readPiece(pieces[0])?.pattern === block ? others.join(",").trimStart() : others.join(",");
    return [comment && !/\s$/.test(kept) ? `${kept} ${comment}` : kept + comment];
  }).join("\n");
}

// Compares names with a pattern as Python's fnmatch does: * ? [abc] [!a-c]. No regular expression is made of it: a
// stranger's pattern could keep one busy for ever.
/** @param {string} pattern @returns {(name: string) => boolean} */
export function matcher(pattern) {
  const parts = partsOf(pattern);
  return (name) => {
    let part = 0, at = 0, star = -1, from = 0;
    while (at < name.length) {
      const fits = parts[part];
      if (fits === ANY) [star, from] = [part++, at];
      else if (fits?.(name[at])) [part, at] = [part + 1, at + 1];
      else if (star >= 0) [part, at] = [star + 1, ++from];
      else return false;
    }
    return parts.slice(part).every((each) => each === ANY);
  };
}

/** @param {string} pattern */
function partsOf(pattern) {
  /** @type {(((letter: string) => boolean) | null)[]} */
  const parts = [];
  for (let i = 0; i < pattern.length; i++) {
    const letter = pattern[i], end = letter === "[" ? endOfSet(pattern, i + 1) : -1;
    if (letter === "*") parts.push(ANY);
    else if (letter === "?") parts.push(() => true);
    else if (end > 0) parts.push(setOf(pattern.slice(i + 1, end)));
    else parts.push((each) => each === letter);
    if (end > 0) i = end;
  }
  return parts;
}

/** @param {string} pattern @param {number} start */
function endOfSet(pattern, start) {
  let from = start;
  if (pattern[from] === "!") from++;
  if (pattern[from] === "]") from++;
  return pattern.indexOf("]", from);
}

/** @param {string} text @returns {(letter: string) => boolean} */
function setOf(text) {
  const other = text.startsWith("!"), letters = other ? text.slice(1) : text;
  /** @type {[string, string][]} */
  const ranges = [];
  for (let i = 0; i < letters.length; i++) {
    const isRange = letters[i + 1] === "-" && i + 2 < letters.length;
    ranges.push([letters[i], letters[isRange ? i + 2 : i]]);
    if (isRange) i += 2;
  }
  return (each) => ranges.some(([first, last]) => first <= each && each <= last) !== other;
}
