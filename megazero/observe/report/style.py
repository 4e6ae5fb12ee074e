"""The style sheet of report.html: light or dark, as the reader's system is."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5b6670; --line: #d9dee3; --back: #fff; --card: #f4f6f8;
  --c0: #0b6bcb; --c1: #d1580c; --c2: #0a7f59; --c3: #a83a8e; --c4: #8a6d00; --c5: #5b50c9; --c6: #b3261e;
  --c7: #4c6470; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9ba7b2; --line: #363e46; --back: #14181c;
  --card: #1e242a; --c0: #64b0ff; --c1: #ff9d57; --c2: #4fcf9f; --c3: #e48bd0; --c4: #d9bd4f; --c5: #a9a1ff;
  --c6: #ff8a80; --c7: #a9bfca; } }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1180px;
  margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 10px; } h3 { font-size: 15px;
  margin: 14px 0 4px; }
p { margin: 6px 0; } small { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 10px; margin-top: 12px; }
.cards div { background: var(--card); border-radius: 6px; padding: 10px 12px; }
.cards b { display: block; font-size: 18px; font-variant-numeric: tabular-nums; } .cards span { color: var(--soft);
  font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 22px 26px; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; font-size: 14px; } svg { width: 100%;
  height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; } svg path { fill: none; } .grid { stroke: var(--line); }
.mark { stroke: var(--soft); stroke-dasharray: 3 3; }
.line path { stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; } .line.faint path { opacity: 0.3;
  stroke-width: 1; }
.line circle { fill: var(--c); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .c6 { --c: var(--c6); } .c7 { --c: var(--c7); }
.legend { font-size: 13px; color: var(--soft); } .legend span { margin-right: 16px; overflow-wrap: anywhere; }
.legend i { display: inline-block; width: 14px; height: 3px; background: var(--c); vertical-align: middle;
  margin-right: 6px; }
table { border-collapse: collapse; font-size: 14px; } th { text-align: left; font-weight: normal; color: var(--soft);
  }
th, td { padding: 3px 14px 3px 0; vertical-align: top; } .wide { overflow-x: auto; }
.values { width: 100%; } .values th { width: 260px; } .values td { overflow-wrap: anywhere; }
.values tr { border-bottom: 1px solid var(--line); }
.given th, .given td { font-weight: 600; color: var(--ink); }
.bars { width: 100%; max-width: 760px; } .bars th { width: 210px; } .bars td:last-child { width: 90px;
  text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bars b { display: block; height: 12px; margin-top: 5px; min-width: 2px; background: var(--c0); border-radius: 2px; }
.ranks td { border: 1px solid var(--line); padding: 6px 8px; white-space: nowrap; }
.ranks th { padding: 6px 12px 6px 0; }
.ranks small { display: block; } .ranks i { display: inline-block; min-width: 24px; text-align: center;
  font-style: normal;
  background: var(--card); border: 1px solid var(--line); border-radius: 4px; margin: 1px 2px; }
pre { background: var(--card); border-radius: 6px; padding: 10px 12px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px; }
summary { cursor: pointer; margin-top: 10px; }
"""
