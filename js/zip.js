// The files of a zip archive, read in the page: the server gets no archive, and a large one need not fit its limit for
// uploads. APPNOTE.TXT of PKWARE, 4.3.7 to 4.3.16.

const END = 0x06054b50, ENTRY = 0x02014b50, LOCAL = 0x04034b50; // signatures
const END_SIZE = 22, LONGEST_COMMENT = 65_535, LARGEST_LIST = 2 ** 26; // bytes
const STORED = 0, DEFLATED = 8; // methods
const LINK = 0xa000, KIND = 0xf000; // of Unix modes
const PLAIN = 2 ** 30, DENSEST = 20; // unpacked bytes that any archive may have, and times its own size beyond

/** @typedef {{ path: string, size: number, read: () => Promise<Blob> }} Entry */

// What is wrong with an archive: unreadable, encrypted, large (more than 4 GB or 65,535 files), outside (a path or link
// that leads out of it), bomb (much more than it can honestly hold), or damaged (a file in it).
export class ZipError extends Error {
  /** @param {string} kind */
  constructor(kind) {
    super(kind);
    this.kind = kind;
  }
}

/** @param {Blob} blob @param {number} from @param {number} size */
async function view(blob, from, size) {
  const part = await blob.slice(from, from + size).arrayBuffer();
  if (part.byteLength < size) throw new ZipError("unreadable");
  return new DataView(part);
}

/** @param {Blob} archive @returns {Promise<Entry[]>} */
export async function entriesOf(archive) {
  const tail = Math.min(archive.size, END_SIZE + LONGEST_COMMENT), last = await view(archive, archive.size - tail, tail);
  let at = tail - END_SIZE;
  while (at >= 0 && last.getUint32(at, true) !== END) at--;
  if (at < 0) throw new ZipError("unreadable");
  const count = last.getUint16(at + 10, true), size = last.getUint32(at + 12, true), from = last.getUint32(at + 16, true);
  if (count === 0xffff || from === 0xffffffff || size > LARGEST_LIST) throw new ZipError("large");
  const list = await view(archive, from, size), entries = [];
  let start = 0, unpacked = 0;
  for (let i = 0; i < count; i++) {
    if (start + 46 > size || list.getUint32(start, true) !== ENTRY) throw new ZipError("unreadable");
    const [flags, method] = [8, 10].map((offset) => list.getUint16(start + offset, true));
    const [crc, packed, whole] = [16, 20, 24].map((offset) => list.getUint32(start + offset, true));
    const [named, extra, comment] = [28, 30, 32].map((offset) => list.getUint16(start + offset, true));
    const mode = list.getUint32(start + 38, true) >>> 16, local = list.getUint32(start + 42, true);
    if (start + 46 + named > size) throw new ZipError("unreadable");
    const path = decoded(new Uint8Array(list.buffer, start + 46, named)).replaceAll("\\", "/");
    start += 46 + named + extra + comment;
    if (/^\/|^[a-z]:|(^|\/)\.\.(\/|$)/i.test(path) || (mode & KIND) === LINK) throw new ZipError("outside");
    if (path.endsWith("/")) continue;
    if (flags & 1) throw new ZipError("encrypted");
    if (method !== STORED && method !== DEFLATED) throw new ZipError("unreadable");
    unpacked += whole;
    entries.push({ path, size: whole, read: () => unpack(archive, { method, crc, packed, whole, local }) });
  }
  if (unpacked > PLAIN && unpacked > DENSEST * archive.size) throw new ZipError("bomb");
  return entries;
}

// Old archivers wrote names in the code page of their system.
/** @param {Uint8Array<ArrayBuffer>} bytes */
function decoded(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return new TextDecoder("windows-1252").decode(bytes);
  }
}

/**
 * @param {Blob} archive
 * @param {{ method: number, crc: number, packed: number, whole: number, local: number }} entry
 */
async function unpack(archive, { method, crc, packed, whole, local }) {
  const head = await view(archive, local, 30);
  if (head.getUint32(0, true) !== LOCAL) throw new ZipError("damaged");
  const from = local + 30 + head.getUint16(26, true) + head.getUint16(28, true);
  const data = archive.slice(from, from + packed);
  const stream = method === STORED ? data.stream() : data.stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const parts = [], reader = stream.getReader();
  let size = 0, sum = 0xffffffff;
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) {
      size += read.value.length;
      if (size > whole) break; // more than it says: nobody unpacks on
      sum = checked(sum, read.value);
      parts.push(read.value);
    }
  } catch {
    throw new ZipError("damaged");
  }
  if (size !== whole || (sum ^ 0xffffffff) >>> 0 !== crc) {
    await reader.cancel();
    throw new ZipError("damaged");
  }
  return new Blob(parts);
}

const CRC = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

/** @param {number} sum @param {Uint8Array} bytes */
function checked(sum, bytes) {
  for (const byte of bytes) sum = CRC[(sum ^ byte) & 0xff] ^ (sum >>> 8);
  return sum;
}
