# Completes lmbench's command line in bash. Offers file names where lmbench has no words.
_lmbench() {
    local IFS=$'\n'
    COMPREPLY=($("$1" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _lmbench lmbench
