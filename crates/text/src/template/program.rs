//! A template, compiled so that whatever makes values passes through [`super::hooks`].
//!
//! The engine has no hook on its operators, but its parser and its compiler can be had apart. In
//! between, the tree is built anew: an operator that can make a value longer has its operands and
//! its result go through filters whose names no template can spell. So nothing is computed while a
//! template is compiled either, since what a filter gives is no constant.

use std::collections::BTreeMap;

use minijinja::{
    Error, Value,
    machinery::{
        CodeGenerator, Instructions, Span,
        ast::{self, BinOpKind, CallArg, Expr, Spanned, Stmt},
        parse,
    },
    syntax::SyntaxConfig,
};

use super::hooks;

pub struct Program {
    pub instructions: Instructions<'static>,
    pub blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl Program {
    /// `source` stays for good: instructions refer to it, and there is one for each model that is
    /// loaded.
    pub fn compile(name: &'static str, source: String, syntax: SyntaxConfig) -> Result<Self, Error> {
        let source: &'static str = source.leak();
        let tree = parse(source, name, syntax)?;
        let tree = Guard::default().statement(&tree).pop().expect("a statement stays one");
        let mut generator = CodeGenerator::new(name, source);
        generator.compile_stmt(&tree);
        let (instructions, blocks) = generator.finish();
        Ok(Self { instructions, blocks })
    }
}

type Statements = Vec<Stmt<'static>>;

#[derive(Default)]
struct Guard {
    /// Names that were looked up so far.
    names: usize,
}

fn spanned<T>(node: T, span: Span) -> Spanned<T> {
    Spanned::new(node, span)
}

fn filter(name: &'static str, expr: Option<Expr<'static>>, span: Span) -> Expr<'static> {
    Expr::Filter(spanned(ast::Filter { name, expr, args: Vec::new() }, span))
}

fn constant(value: Value, span: Span) -> Expr<'static> {
    Expr::Const(spanned(ast::Const { value }, span))
}

/// Passes a value through a filter; constants of the source are as short as the source.
fn through(name: &'static str, expr: Expr<'static>) -> Expr<'static> {
    let span = expr.span();
    if matches!(expr, Expr::Const(_)) { expr } else { filter(name, Some(expr), span) }
}

/// Wraps an expression in the hook `HOLD`, constants too, so that nothing is left to fold.
fn held(expr: Expr<'static>) -> Expr<'static> {
    let span = expr.span();
    filter(hooks::HOLD, Some(expr), span)
}

fn emit(expr: Expr<'static>, span: Span) -> Stmt<'static> {
    Stmt::EmitExpr(spanned(ast::EmitExpr { expr }, span))
}

impl Guard {
    fn statements(&mut self, statements: &[Stmt<'static>]) -> Statements {
        statements.iter().flat_map(|statement| self.statement(statement)).collect()
    }

    fn statement(&mut self, statement: &Stmt<'static>) -> Statements {
        let one = match statement {
            Stmt::Template(node) => {
                Stmt::Template(spanned(ast::Template { children: self.statements(&node.children) }, node.span()))
            }
            // Emitted values go through the formatter, which counts them; so raw text is emitted
            // too.
            Stmt::EmitRaw(node) => emit(constant(Value::from(node.raw), node.span()), node.span()),
            Stmt::EmitExpr(node) => {
                let expr = match &node.expr {
                    // A call whose value is only emitted may be one of a loop or of a block, which
                    // the compiler must see.
                    Expr::Call(call) => Expr::Call(self.call(call)),
                    expr => self.expr(expr),
                };
                emit(expr, node.span())
            }
            Stmt::ForLoop(node) => Stmt::ForLoop(spanned(self.for_loop(node), node.span())),
            Stmt::IfCond(node) => {
                let (expr, true_body) = (self.expr(&node.expr), self.statements(&node.true_body));
                let false_body = self.statements(&node.false_body);
                Stmt::IfCond(spanned(ast::IfCond { expr, true_body, false_body }, node.span()))
            }
            Stmt::WithBlock(node) => {
                let assignment =
                    |(target, expr): &(Expr<'static>, Expr<'static>)| (self.target(target), self.expr(expr));
                let assignments = node.assignments.iter().map(assignment).collect();
                let body = self.statements(&node.body);
                Stmt::WithBlock(spanned(ast::WithBlock { assignments, body }, node.span()))
            }
            Stmt::Set(node) => {
                let expr = self.expr(&node.expr);
                let expr = match node.target {
                    Expr::GetAttr(_) => through(hooks::ATTRIBUTE, expr),
                    _ => expr,
                };
                Stmt::Set(spanned(ast::Set { target: self.target(&node.target), expr }, node.span()))
            }
            Stmt::SetBlock(node) => {
                let inner = node.filter.as_ref().map(|filter| self.expr(filter));
                let filter = Some(filter(hooks::HOLD, inner, node.span()));
                let (target, body) = (self.target(&node.target), self.statements(&node.body));
                Stmt::SetBlock(spanned(ast::SetBlock { target, filter, body }, node.span()))
            }
            Stmt::AutoEscape(node) => {
                let (enabled, body) = (self.expr(&node.enabled), self.statements(&node.body));
                Stmt::AutoEscape(spanned(ast::AutoEscape { enabled, body }, node.span()))
            }
            Stmt::FilterBlock(node) => {
                let (filter, body) = (self.expr(&node.filter), self.statements(&node.body));
                Stmt::FilterBlock(spanned(ast::FilterBlock { filter, body }, node.span()))
            }
            Stmt::Block(node) => {
                let body = self.statements(&node.body);
                Stmt::Block(spanned(ast::Block { name: node.name, required: node.required, body }, node.span()))
            }
            Stmt::Import(node) => {
                let (expr, name) = (self.expr(&node.expr), self.target(&node.name));
                Stmt::Import(spanned(ast::Import { expr, name }, node.span()))
            }
            Stmt::FromImport(node) => {
                let name = |(name, alias): &(Expr<'static>, Option<Expr<'static>>)| {
                    (self.target(name), alias.as_ref().map(|alias| self.target(alias)))
                };
                let names = node.names.iter().map(name).collect();
                Stmt::FromImport(spanned(ast::FromImport { expr: self.expr(&node.expr), names }, node.span()))
            }
            Stmt::Extends(node) => Stmt::Extends(spanned(ast::Extends { name: self.expr(&node.name) }, node.span())),
            Stmt::Include(node) => {
                let (name, ignore_missing) = (self.expr(&node.name), node.ignore_missing);
                Stmt::Include(spanned(ast::Include { name, ignore_missing }, node.span()))
            }
            Stmt::Macro(node) => {
                let names = self.names;
                let definition = Stmt::Macro(self.macro_definition(node));
                return vec![definition, self.closure(names, node.span())];
            }
            Stmt::CallBlock(node) => {
                let names = self.names;
                let (call, macro_decl) = (self.call(&node.call), self.macro_definition(&node.macro_decl));
                let block = Stmt::CallBlock(spanned(ast::CallBlock { call, macro_decl }, node.span()));
                return vec![block, self.closure(names, node.span())];
            }
            Stmt::Continue(node) => Stmt::Continue(spanned(ast::Continue, node.span())),
            Stmt::Break(node) => Stmt::Break(spanned(ast::Break, node.span())),
            Stmt::Do(node) => Stmt::Do(spanned(ast::Do { call: self.call(&node.call) }, node.span())),
        };
        vec![one]
    }

    fn for_loop(&mut self, node: &ast::ForLoop<'static>) -> ast::ForLoop<'static> {
        let iter = self.expr(&node.iter);
        let filter_expr = node.filter_expr.as_ref().map(|expr| self.expr(expr));
        // One with a condition makes a list of what it lets through.
        let iter = if filter_expr.is_some() { through(hooks::COPY, iter) } else { iter };
        ast::ForLoop {
            target: self.target(&node.target),
            iter,
            filter_expr,
            recursive: node.recursive,
            body: self.statements(&node.body),
            else_body: self.statements(&node.else_body),
        }
    }

    fn macro_definition(&mut self, node: &Spanned<ast::Macro<'static>>) -> Spanned<ast::Macro<'static>> {
        let args = node.args.iter().map(|arg| self.target(arg)).collect();
        let defaults = node.defaults.iter().map(|expr| self.expr(expr)).collect();
        let body = self.statements(&node.body);
        spanned(ast::Macro { name: node.name, args, defaults, body }, node.span())
    }

    /// Each time a macro is defined, what it knows of the names it mentions is kept to the end.
    /// Emits nothing.
    fn closure(&self, names_before: usize, span: Span) -> Stmt<'static> {
        let names = constant(Value::from(self.names - names_before), span);
        emit(filter(hooks::CLOSURE, Some(names), span), span)
    }

    fn option(&mut self, expr: &Option<Expr<'static>>) -> Option<Expr<'static>> {
        expr.as_ref().map(|expr| self.expr(expr))
    }

    fn exprs(&mut self, exprs: &[Expr<'static>]) -> Vec<Expr<'static>> {
        exprs.iter().map(|expr| self.expr(expr)).collect()
    }

    /// The target of an assignment: a name, names, or an attribute.
    fn target(&mut self, target: &Expr<'static>) -> Expr<'static> {
        match target {
            Expr::List(node) => {
                let items = node.items.iter().map(|item| self.target(item)).collect();
                Expr::List(spanned(ast::List { items }, node.span()))
            }
            Expr::Tuple(node) => {
                let items = node.items.iter().map(|item| self.target(item)).collect();
                Expr::Tuple(spanned(ast::Tuple { items }, node.span()))
            }
            other => self.expr(other),
        }
    }

    fn expr(&mut self, expr: &Expr<'static>) -> Expr<'static> {
        match expr {
            Expr::Var(node) => {
                self.names += 1;
                Expr::Var(spanned(ast::Var { id: node.id }, node.span()))
            }
            Expr::Const(node) => constant(node.value.clone(), node.span()),
            Expr::Slice(node) => {
                let (step, inner) = (self.option(&node.step), self.expr(&node.expr));
                let expr = if step.is_some() { through(hooks::CHARACTERS, inner) } else { inner };
                let (start, stop) = (self.option(&node.start), self.option(&node.stop));
                held(Expr::Slice(spanned(ast::Slice { expr, start, stop, step }, node.span())))
            }
            Expr::UnaryOp(node) => {
                // It is not `Clone`.
                let op = if matches!(node.op, ast::UnaryOpKind::Not) {
                    ast::UnaryOpKind::Not
                } else {
                    ast::UnaryOpKind::Neg
                };
                Expr::UnaryOp(spanned(ast::UnaryOp { op, expr: self.expr(&node.expr) }, node.span()))
            }
            Expr::BinOp(node) => self.operator(node),
            Expr::Compare(node) => {
                let expr = through(hooks::WEIGH, self.expr(&node.expr));
                let operand = |op: &ast::CompareOp<'static>| ast::CompareOp {
                    op: op.op,
                    expr: through(hooks::WEIGH, self.expr(&op.expr)),
                };
                let ops = node.ops.iter().map(operand).collect();
                Expr::Compare(spanned(ast::Compare { expr, ops }, node.span()))
            }
            Expr::IfExpr(node) => {
                let (test_expr, true_expr) = (self.expr(&node.test_expr), self.expr(&node.true_expr));
                let false_expr = self.option(&node.false_expr);
                Expr::IfExpr(spanned(ast::IfExpr { test_expr, true_expr, false_expr }, node.span()))
            }
            Expr::Filter(node) => {
                let (expr, args) = (self.option(&node.expr), self.args(&node.args));
                Expr::Filter(spanned(ast::Filter { name: node.name, expr, args }, node.span()))
            }
            Expr::Test(node) => {
                let (expr, args) = (self.expr(&node.expr), self.args(&node.args));
                // Most tests look at what kind of value it is, and only those with an argument at
                // what is in it.
                let expr = if args.is_empty() { expr } else { through(hooks::WEIGH, expr) };
                Expr::Test(spanned(ast::Test { name: node.name, expr, args }, node.span()))
            }
            Expr::GetAttr(node) => {
                Expr::GetAttr(spanned(ast::GetAttr { expr: self.expr(&node.expr), name: node.name }, node.span()))
            }
            Expr::GetItem(node) => {
                let (expr, subscript_expr) = (self.expr(&node.expr), self.expr(&node.subscript_expr));
                Expr::GetItem(spanned(ast::GetItem { expr, subscript_expr }, node.span()))
            }
            Expr::Call(node) => held(Expr::Call(self.call(node))),
            Expr::List(node) => held(Expr::List(spanned(ast::List { items: self.exprs(&node.items) }, node.span()))),
            Expr::Tuple(node) => held(Expr::Tuple(spanned(ast::Tuple { items: self.exprs(&node.items) }, node.span()))),
            Expr::Map(node) => {
                let (keys, values) = (self.exprs(&node.keys), self.exprs(&node.values));
                held(Expr::Map(spanned(ast::Map { keys, values }, node.span())))
            }
        }
    }

    fn operator(&mut self, node: &Spanned<ast::BinOp<'static>>) -> Expr<'static> {
        use BinOpKind::*;
        let (left, right) = (self.expr(&node.left), self.expr(&node.right));
        let (left, right) = match node.op {
            Concat => (through(hooks::SHOWN, left), through(hooks::SHOWN, right)),
            // Both sides, constants too: the right one asks for the left one.
            Mul => {
                let (left_span, right_span) = (left.span(), right.span());
                (filter(hooks::FACTOR, Some(left), left_span), filter(hooks::TIMES, Some(right), right_span))
            }
            Eq | Ne | Lt | Lte | Gt | Gte | In => (through(hooks::WEIGH, left), through(hooks::WEIGH, right)),
            ScAnd | ScOr | Add | Sub | Div | FloorDiv | Rem | Pow => (left, right),
        };
        // Two constants would be added while compiling; they are no longer than the source, and so
        // is their sum.
        let whole = Expr::BinOp(spanned(ast::BinOp { op: node.op, left, right }, node.span()));
        if matches!(node.op, Add | Mul | Concat) { held(whole) } else { whole }
    }

    fn call(&mut self, node: &Spanned<ast::Call<'static>>) -> Spanned<ast::Call<'static>> {
        let (expr, args) = (self.expr(&node.expr), self.args(&node.args));
        spanned(ast::Call { expr, args }, node.span())
    }

    fn args(&mut self, args: &[CallArg<'static>]) -> Vec<CallArg<'static>> {
        let arg = |arg: &CallArg<'static>| match arg {
            CallArg::Pos(expr) => CallArg::Pos(self.expr(expr)),
            CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, self.expr(expr)),
            // A list's items are copied to where arguments lie.
            CallArg::PosSplat(expr) => CallArg::PosSplat(through(hooks::COPY, self.expr(expr))),
            CallArg::KwargSplat(expr) => CallArg::KwargSplat(self.expr(expr)),
        };
        args.iter().map(arg).collect()
    }
}
