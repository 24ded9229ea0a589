"""The look of ``report.html``: system fonts, figures in columns, light and dark by the reader's own setting."""

STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1c2126; --soft: #5d6873; --line: #dfe3e8; --wash: #f5f7f9;
  --better: #14713f; --worse: #b3261e; --warning: #8a5300; --warning-wash: #fff5e0; --link: #1f5fa8; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14181c; --ink: #e4e8ec; --soft: #98a3ae; --line: #2d343b; --wash: #1b2126;
  --better: #5fcf94; --worse: #ff8a80; --warning: #f0b35a; --warning-wash: #2a2213; --link: #86b8f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 28px 32px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 16px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 44px 0 12px; padding-top: 14px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 26px 0 6px; }
.kind { margin: 0 0 2px; color: var(--soft); font-size: 13px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(290px, 1fr)); gap: 10px 32px; margin: 0; }
.facts dt { color: var(--soft); font-size: 12px; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 22px 0 0; padding: 10px 0; font-size: 13px;
  border-top: 1px solid var(--line); border-bottom: 1px solid var(--line); }
nav a { color: var(--link); text-decoration: none; }
nav a:hover { text-decoration: underline; }
nav + main h2 { scroll-margin-top: 12px; }
.caption { color: var(--soft); font-size: 13px; margin: 4px 0 8px; max-width: 110ch; }
.fine { color: var(--better); }
#reading p { max-width: 100ch; }
.flags { list-style: none; margin: 0; padding: 0; display: grid; gap: 8px; }
.flags li { padding: 8px 14px; border-left: 3px solid var(--line); background: var(--wash);
  overflow-wrap: anywhere; }
.flags .warning { border-color: var(--warning); background: var(--warning-wash); }
.flags .warning b { color: var(--warning); }
.gates { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0 0 12px; padding: 0;
  font-size: 13px; }
.gates .passed { color: var(--better); } .gates .open { color: var(--warning); font-weight: 600; }
.scroll { overflow: auto; max-height: 82vh; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px; white-space: nowrap; text-align: left; vertical-align: baseline; }
th.number, td.number { text-align: right; }
thead th { position: sticky; top: 0; z-index: 1; background: var(--wash); border-bottom: 1px solid var(--line);
  color: var(--soft); font-weight: 600; }
th[title] { text-decoration: underline dotted; text-underline-offset: 3px; cursor: help; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--paper); font-weight: 600; }
thead th:first-child { z-index: 2; background: var(--wash); }
.texts td:first-child { font-weight: 400; }
tbody + tbody tr:first-child td { border-top: 1px solid var(--line); }
tbody tr:hover td { background: var(--wash); }
td small { color: var(--soft); font-size: 11.5px; }
.texts td { white-space: normal; overflow-wrap: anywhere; min-width: 7em; }
.better { color: var(--better); } .worse { color: var(--worse); } .muted { color: var(--soft); }
.warning { color: var(--warning); } td.warning { font-weight: 600; } .flags li { color: var(--ink); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 20px 0 4px; padding: 0;
  font-size: 13px; }
.legend li { display: inline-flex; align-items: center; gap: 6px; }
figure { margin: 14px 0; }
figcaption { font-size: 13px; font-weight: 600; margin: 0 0 4px; }
.plot { width: 100%; max-width: 1080px; height: auto; display: block; color: var(--ink); }
.plot text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif !important; }
details { margin: 12px 0; } summary { cursor: pointer; }
pre { font-size: 12.5px; line-height: 1.45; overflow: auto; padding: 12px 14px; background: var(--wash);
  border-radius: 6px; }
@media print { body { max-width: none; padding: 0; } nav { display: none; } .scroll { max-height: none;
  overflow: visible; } }
"""
