"""What a person sees of a screen: letters too small or too faint, links behind nodes, overlaps, empty rooms."""

LEAST_LETTERS = 10  # pixels on the screen
LEAST_CONTRAST = 4.5  # to 1
MOST_EMPTY = 0.25  # of a node's height, in one piece
# What the pack writes: on its nodes and pages, and in the notes of its templates, of which each renderer has its own.
OURS = "[class*='atelier-'], [class*='atelier-'] *, [data-atelier-note] :is(.tiptap, .comfy-markdown-content) *"

# Texts within the elements of a selector, with their height on the screen and their contrast with what is behind them.
TEXTS = """selector => {
    const channel = value => value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
    const parse = text => {
        const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
        return text.startsWith("color(srgb") ? [255 * r, 255 * g, 255 * b, a] : [r, g, b, a];
    };
    const over = ([r, g, b, a], under) => [r, g, b].map((value, i) => a * value + (1 - a) * under[i]);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const behind = element => {
        const layers = [];
        for (let each = element; each; each = each.parentElement)
            layers.push(parse(getComputedStyle(each).backgroundColor));
        return layers.reverse().reduce((under, layer) => over(layer, under), [0, 0, 0]);
    };
    const found = [];
    for (const element of document.querySelectorAll(selector)) {
        const text = [...element.childNodes].filter(node => node.nodeType === 3).map(node => node.data.trim()).join("");
        const style = getComputedStyle(element), box = element.getBoundingClientRect();
        if (!text || !box.width || !element.checkVisibility() || element.closest("button:disabled, option")) continue;
        const ground = behind(element), drawn = element.getScreenCTM?.(); // in a picture
        const ink = light(over(parse(drawn ? style.fill : style.color), ground)), under = light(ground);
        const contrast = (Math.max(ink, under) + 0.05) / (Math.min(ink, under) + 0.05);
        let wide = element; // offsetWidth is a whole number of pixels: a single letter's tells no scale
        while (!(wide.offsetWidth >= 100) && wide.parentElement) wide = wide.parentElement;
        const scale = drawn?.a ?? wide.getBoundingClientRect().width / wide.offsetWidth;
        found.push([text.slice(0, 40), parseFloat(style.fontSize) * scale, contrast]);
    }
    return found;
}"""

# Links that pass behind a node they do not belong to: points of the curve that the editor draws, in its own numbers.
BEHIND = """() => {
    const { graph } = window.app, edge = 6, found = [];
    for (const link of [...graph.links.values()]) {
        const [from, to] = [link.origin_id, link.target_id].map((id) => graph.getNodeById(id));
        const [[ax, ay], [bx, by]] = [from.getOutputPos(link.origin_slot), to.getInputPos(link.target_slot)];
        const pull = Math.hypot(bx - ax, by - ay) / 4;
        for (let i = 0; i <= 100; i++) {
            const t = i / 100, s = 1 - t;
            const x = s ** 3 * ax + 3 * s * s * t * (ax + pull) + 3 * s * t * t * (bx - pull) + t ** 3 * bx;
            const y = s ** 3 * ay + 3 * s * s * t * ay + 3 * s * t * t * by + t ** 3 * by;
            for (const node of graph.nodes) {
                const [left, top, width, height] = node.boundingRect;
                if (node !== from && node !== to && x > left + edge && x < left + width - edge && y > top + edge &&
                    y < top + height - edge) found.push(`${from.type} to ${to.type} behind ${node.type}`);
            }
        }
    }
    return [...new Set(found)];
}"""

OVERLAPS = """() => window.app.graph.nodes.flatMap((one, i, all) => all.slice(i + 1).filter(other => {
    const [ax, ay, aw, ah] = one.boundingRect, [bx, by, bw, bh] = other.boundingRect;
    return ax < bx + bw && bx < ax + aw && ay < by + bh && by < ay + ah;
}).map(other => `${one.title} over ${other.title}`))"""

# The pack's nodes with the largest share of their height that is empty.
EMPTY = """vue => window.app.graph.nodes.filter(node => !node.flags.collapsed &&
        (node.comfyClass?.startsWith("Atelier") || node.subgraph)).map(node => {
    if (vue) {
        const outer = document.querySelector(`[data-node-id="${node.id}"]`), box = outer.getBoundingClientRect();
        const inner = [...outer.querySelectorAll("*")].filter(each => each.checkVisibility() &&
            ((!each.children.length && each.textContent.trim()) ||
                /^(IMG|CANVAS|INPUT|TEXTAREA|BUTTON|svg)$/.test(each.tagName)));
        const parts = inner.map(each => each.getBoundingClientRect()).sort((one, other) => one.top - other.top);
        let low = box.top, widest = 0; // between what stands above one another, as the editor puts some at the foot
        for (const { top, bottom } of parts) [widest, low] = [Math.max(widest, top - low), Math.max(low, bottom)];
        return [node.title, Math.max(widest, box.bottom - low) / box.height];
    }
    const slots = Math.max(node.inputs?.filter(each => !each.widget).length ?? 0, node.outputs?.length ?? 0);
    const widgets = (node.widgets ?? []).filter(each => !each.hidden && each.y && node.isWidgetVisible(each));
    const low = Math.max(slots * window.LiteGraph.NODE_SLOT_HEIGHT,
        ...widgets.map(each => each.y + (each.computedHeight ?? each.height ?? 20)));
    return [node.title, node.imgs?.length ? 0 : (node.size[1] - low) / node.size[1]];
})"""
# Notes whose end is seen only by who scrolls.
CUT = """() => [...document.querySelectorAll("[data-atelier-note] :is(.tiptap, .comfy-markdown-content)")]
    .filter(each => each.checkVisibility() && each.scrollHeight > each.clientHeight + 1)
    .map(each => `cut: ${each.textContent.slice(0, 40)}`)"""
# Nodes of which a part, more than a rounded pixel, lies beneath the editor's minimap, which it shows by default, or
# beneath its side panel, if one is open at the left.
COVERED = """() => {
    const map = document.querySelector("[data-testid=minimap-container]").getBoundingClientRect();
    const panel = document.querySelector(".side-bar-panel")?.getBoundingClientRect();
    const { ds, canvas } = window.app.canvas, from = canvas.getBoundingClientRect();
    return window.app.graph.nodes.flatMap(node => {
        const [x, top, width, height] = node.boundingRect;
        const left = (x + ds.offset[0]) * ds.scale + from.left, right = left + width * ds.scale;
        const bottom = (top + height + ds.offset[1]) * ds.scale + from.top;
        return [
            ...(right > map.left + 1 && bottom > map.top + 1 ? [`beneath the minimap: ${node.title}`] : []),
            ...(panel?.width && left < panel.right - 1 ? [`beneath the side panel: ${node.title}`] : []),
        ];
    });
}"""
SMALL = "() => 12 * window.app.canvas.ds.scale"  # pixels on the screen of the smallest letters that the canvas draws


def faint(page, selector: str) -> list[str]:
    """List the texts of a part of the page that are smaller or fainter than a person reads with ease."""
    return [
        f"{text}: {size:.1f} px, {contrast:.1f} : 1"
        for text, size, contrast in page.evaluate(TEXTS, selector)
        if size < LEAST_LETTERS - 0.05 or contrast < LEAST_CONTRAST
    ]


def faults(editor) -> list[str]:
    """List what a person would dislike of the canvas as it is shown."""
    page = editor.page
    small = page.evaluate(SMALL)
    found = faint(page, OURS) + page.evaluate(CUT)
    found += [f"letters of the canvas: {small:.1f} px"] if small < LEAST_LETTERS else []
    found += page.evaluate(BEHIND) + page.evaluate(OVERLAPS) + page.evaluate(COVERED)
    empty = page.evaluate(EMPTY, editor.vue)
    return found + [f"{title} is {share:.0%} empty" for title, share in empty if share > MOST_EMPTY]


# A file dropped on the canvas, and the note of the graph that it becomes.
DROP = """([name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""
# The editor covers the page while it reads a file; one dropped before the cover is gone would leave it for good.
UNCOVERED = "() => !document.querySelector('.p-blockui-mask')"
NOTE = "() => window.app.graph.nodes.find(node => node.type === 'MarkdownNote')?.widgets[0].value"
