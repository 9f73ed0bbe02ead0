//! Changes to a template's text before it is compiled.

/// Newlines as Jinja reads them, and `{% generation %}` blocks turned into plain scopes.
pub fn prepare(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    replace_tag(&replace_tag(&source, "generation", "with"), "endgeneration", "endwith")
}

/// Replaces `{% name %}` by `{% with %}`, keeping the whitespace marks on either side.
fn replace_tag(source: &str, name: &str, with: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        rest = tag;
        let body = tag.trim_start_matches(['-', '+']).trim_start();
        if let Some(after) = body.strip_prefix(name) {
            let end = after.trim_start();
            let closes = end.trim_start_matches(['-', '+']).starts_with("%}");
            if closes {
                out.push_str(&tag[..tag.len() - body.len()]);
                out.push_str(with);
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_scopes() {
        let check = |input: &str, expect: &str| assert_eq!(prepare(input), expect);
        check("a{% generation %}b{% endgeneration %}c", "a{% with %}b{% endwith %}c");
        check("{%- generation -%} x {%-endgeneration+%}", "{%- with -%} x {%-endwith+%}");
        check("{% set generation = 1 %}{{ generation }}", "{% set generation = 1 %}{{ generation }}");
        check("{% generations %}", "{% generations %}");
        check("a\r\nb\rc{%", "a\nb\nc{%");
    }
}
